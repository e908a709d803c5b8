// Device memory, pinned memory, and copies between them.
//
// Fresh memory holds NaN in every float format (and -1 in every integer), freed memory another NaN, so that neither
// can pass for a result. Freed blocks are kept and used again for device memory only: work that still writes to one
// spoils the device's bytes, never the process.

#include <cstdlib>
#include <cstring>

#include "device.h"

namespace standin {
namespace {

struct Block {
    size_t size = 0;
    size_t room = 0;
    int device = 0;
};

std::mutex memory;
std::map<uintptr_t, Block> device_blocks;
std::map<uintptr_t, size_t> pinned_blocks;
std::map<size_t, std::deque<void*>> kept;     // freed blocks by room, oldest first
std::unordered_map<int, size_t> used;

constexpr size_t kAlign = 512;

size_t room_of(size_t size) {                 // four steps to a power of two
    size_t step = kAlign;
    while (step * 8 < size) step *= 2;
    return (size + step - 1) / step * step;
}

template <typename Value>
bool holds(const std::map<uintptr_t, Value>& blocks, const void* address, size_t (*size)(const Value&)) {
    const auto where = reinterpret_cast<uintptr_t>(address);
    auto after = blocks.upper_bound(where);
    if (after == blocks.begin()) return false;
    --after;
    return where < after->first + size(after->second);
}

void poison(void* address, size_t room) {
    auto* words = static_cast<uint16_t*>(address);
    for (size_t place = 0; place < room / 2; ++place) words[place] = 0xFFFE;
}

int allocate(void** address, size_t size) {
    const int device = current_device();
    std::lock_guard<std::mutex> guard(memory);
    count("allocation_calls");
    if (used[device] + size > configuration().memory_limit) {
        return fail(kOutOfMemory, "EL0004: Failed to allocate memory. Possible cause: available memory is "
                                  "insufficient. Asked for " + std::to_string(size) + " bytes with " +
                                  std::to_string(used[device]) + " of " +
                                  std::to_string(configuration().memory_limit) + " in use.");
    }
    const size_t room = room_of(size ? size : 1);
    auto& same = kept[room];
    if (same.size() > 4) {                    // not the ones freed last: what still reads them should read poison
        *address = same.front();
        same.pop_front();
    } else {
        *address = std::aligned_alloc(kAlign, room);
        if (!*address) return fail(kOutOfMemory, "EL0004: the host has no memory for the software device");
    }
    std::memset(*address, 0xFF, room);
    device_blocks[reinterpret_cast<uintptr_t>(*address)] = Block{size, room, device};
    used[device] += size;
    count("device_allocations");
    count("bytes_allocated", static_cast<int64_t>(size));
    return kSuccess;
}

const char* direction(int kind) {
    return kind == 1 ? "h2d" : kind == 2 ? "d2h" : kind == 3 ? "d2d" : "h2h";
}

// ACL_MEMCPY_DEFAULT (4): by the addresses.
int resolved(int kind, const void* target, const void* source) {
    if (kind != 4) return kind;
    const bool to = is_device_memory(target), from = is_device_memory(source);
    return to ? (from ? 3 : 1) : (from ? 2 : 0);
}

int check_copy(const void* target, size_t room, const void* source, size_t size, int kind) {
    if (size > room) return fail(kParamInvalid, "EE1001: memcpy: count is larger than the destination");
    if (size == 0) return kSuccess;
    const bool to = kind == 1 || kind == 3, from = kind == 2 || kind == 3;
    if (to != is_device_memory(target) || from != is_device_memory(source)) {
        return fail(kParamInvalid, std::string("EE1001: memcpy: an address does not fit the direction ") +
                                       direction(kind));
    }
    return kSuccess;
}

}  // namespace

bool is_device_memory(const void* address) {
    std::lock_guard<std::mutex> guard(memory);
    return holds<Block>(device_blocks, address, [](const Block& block) { return block.room; });
}

bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> guard(memory);
    return holds<size_t>(pinned_blocks, address, [](const size_t& size) { return size; });
}

size_t used_memory(int device) {
    std::lock_guard<std::mutex> guard(memory);
    return used[device];
}

extern "C" {

int aclrtMalloc(void** address, size_t size, int) { return allocate(address, size); }
int aclrtMallocAlign32(void** address, size_t size, int) { return allocate(address, size); }

int aclrtFree(void* address) {
    std::lock_guard<std::mutex> guard(memory);
    auto found = device_blocks.find(reinterpret_cast<uintptr_t>(address));
    if (found == device_blocks.end()) return fail(kParamInvalid, "EE1001: free: not an address of device memory");
    used[found->second.device] -= found->second.size;
    poison(address, found->second.room);
    kept[found->second.room].push_back(address);
    device_blocks.erase(found);
    count("device_frees");
    return kSuccess;
}

int aclrtMallocHost(void** address, size_t size) {
    *address = std::aligned_alloc(64, (size + 63) / 64 * 64);
    if (!*address) return fail(kOutOfMemory, "EE1013: insufficient host memory");
    std::lock_guard<std::mutex> guard(memory);
    pinned_blocks[reinterpret_cast<uintptr_t>(*address)] = size ? size : 1;
    count("pinned_allocations");
    return kSuccess;
}

int aclrtFreeHost(void* address) {
    {
        std::lock_guard<std::mutex> guard(memory);
        pinned_blocks.erase(reinterpret_cast<uintptr_t>(address));
    }
    std::free(address);
    return kSuccess;
}

int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total) {
    *total = configuration().memory_limit;
    *free_bytes = *total - used_memory(current_device());
    return kSuccess;
}

int aclrtMemcpy(void* target, size_t room, const void* source, size_t size, int kind) {
    kind = resolved(kind, target, source);
    if (const int code = forbid_while_capturing("a synchronous copy", true)) return code;
    if (const int code = check_copy(target, room, source, size, kind)) return code;
    const void* host = kind == 1 ? source : target;
    count(std::string(direction(kind)).append(kind == 3 ? "" : is_pinned(host) ? "_pinned" : "_pageable")
              .append("_blocking").c_str());
    count(std::string(direction(kind)).append("_bytes").c_str(), static_cast<int64_t>(size));
    std::memmove(target, source, size);
    return kSuccess;
}

int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t size, int kind, void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    kind = resolved(kind, target, source);
    if (const int code = check_copy(target, room, source, size, kind)) return code;
    Task task;
    task.kind = Kind::kCopy;
    task.target = target;
    task.source = source;
    task.size = size;
    if (kind == 3) {
        launch("aclrtMemcpyAsync", stream);
    } else {
        const bool pinned = is_pinned(kind == 1 ? source : target);
        if (!pinned && stream->capture) {
            stream->capture->invalid = true;
            return fail(kAsyncToSync, "EE9999: an asynchronous copy with pageable host memory is a synchronous one, "
                                      "which a captured stream does not permit.");
        }
        count(std::string(direction(kind)).append(pinned ? "_pinned_async" : "_pageable_async").c_str());
        if (!pinned && kind == 1) {           // the runtime has read it before the call returns
            task.staged = std::make_shared<std::vector<char>>(static_cast<const char*>(source),
                                                              static_cast<const char*>(source) + size);
        }
    }
    count(std::string(direction(kind)).append("_bytes").c_str(), static_cast<int64_t>(size));
    note_copy(stream, push(stream, std::move(task)));
    return kSuccess;
}

int aclrtMemset(void* target, size_t, int value, size_t size) {
    std::memset(target, value, size);
    return kSuccess;
}

int aclrtMemsetAsync(void* target, size_t, int value, size_t size, void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    launch("aclrtMemsetAsync", stream);
    Task task;
    task.kind = Kind::kSet;
    task.target = target;
    task.value = static_cast<uint64_t>(value);
    task.size = size;
    note_copy(stream, push(stream, std::move(task)));
    return kSuccess;
}

}  // extern "C"
}  // namespace standin
