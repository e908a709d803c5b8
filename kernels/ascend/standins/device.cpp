// Devices, contexts, streams and synchronisation: the part of the runtime that only keeps books.

#include "device.h"

#include <cstdlib>
#include <cstring>

namespace standin {
namespace {

thread_local int device_of_thread = 0;
char contexts[64];                       // the address of a byte is the context of that device

int check_device(int device) {
    if (device >= 0 && device < configuration().devices) return kSuccess;
    return fail(kInvalidDevice, "EE1001: The argument is invalid. Reason: invalid device ID " +
                                    std::to_string(device) + ", range [0," +
                                    std::to_string(configuration().devices) + ")");
}

int synchronize(Stream* stream) {
    if (stream->capture) {
        stream->capture->invalid = true;
        return fail(kStreamCaptured, "EE9999: synchronizing a stream is not permitted while it is captured.");
    }
    count("stream_syncs");
    return run_stream(stream);
}

int synchronize_device() {
    if (const int code = forbid_while_capturing("synchronizing the device", true)) return code;
    count("device_syncs");
    return run_device(current_device());
}

}  // namespace

Configuration& configuration() {
    static Configuration the;
    return the;
}

int current_device() { return device_of_thread; }

extern "C" {

void standin_configure(const char* chip, const char* cann, int devices, uint64_t memory_limit, int streams) {
    configuration().chip = chip;
    configuration().cann = cann;
    configuration().devices = devices;
    configuration().memory_limit = memory_limit;
    configuration().streams = streams;
}

int standin_run(int device) { return run_device(device); }
int standin_run_stream(void* stream) { return run_stream(static_cast<Stream*>(stream)); }
int standin_is_capturing(void* stream) {
    auto* one = static_cast<Stream*>(stream);
    return one->capture ? 1 : one->update ? 2 : 0;
}
int standin_is_pinned(const void* address) { return is_pinned(address); }
uint64_t standin_used(int device) { return used_memory(device); }

int aclInit(const char*) { return kSuccess; }
int aclFinalize() { return kSuccess; }
const char* aclrtGetSocName() { return configuration().chip.c_str(); }

int aclrtGetDeviceCount(uint32_t* count_out) {
    *count_out = static_cast<uint32_t>(configuration().devices);
    return kSuccess;
}

int aclrtSetDevice(int device) {
    if (const int code = check_device(device)) return code;
    device_of_thread = device;
    return kSuccess;
}

int aclrtResetDevice(int) { return kSuccess; }

int aclrtGetDevice(int* device) {
    *device = device_of_thread;
    return kSuccess;
}

int aclrtGetCurrentContext(void** context) {
    *context = contexts + device_of_thread;
    return kSuccess;
}

int aclrtSetCurrentContext(void* context) {
    device_of_thread = static_cast<int>(static_cast<char*>(context) - contexts);
    return kSuccess;
}

int aclrtGetPrimaryCtxState(int, uint32_t* flags, int* active) {
    if (flags) *flags = 0;
    *active = 1;
    return kSuccess;
}

int aclrtGetSysParamOpt(int, int64_t* value) {
    *value = 0;
    return kSuccess;
}
int aclrtSetSysParamOpt(int, int64_t) { return kSuccess; }
int aclrtCtxSetSysParamOpt(int, int64_t) { return kSuccess; }

int aclrtDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return kSuccess;
}
int aclrtDeviceEnablePeerAccess(int, uint32_t) { return kSuccess; }

int aclrtDeviceGetBareTgid(int* pid) {
    *pid = 0;
    return kSuccess;
}

// The three parts of a version that torch_npu reads: "9.1.0", "8.3.RC1".
int aclsysGetVersionStr(char*, char* text) {
    std::strcpy(text, configuration().cann.c_str());
    return kSuccess;
}

int aclsysGetCANNVersion(int, void* version) {
    constexpr size_t kText = 128;        // ACL_PKG_VERSION_MAX_SIZE: the text comes first
    std::strncpy(static_cast<char*>(version), configuration().cann.c_str(), kText - 1);
    return kSuccess;
}

// --- streams -------------------------------------------------------------------------------------------------------

int aclrtCreateStream(void** stream) {
    *stream = new_stream(current_device());
    return kSuccess;
}
int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

int aclrtDestroyStream(void* stream) {
    destroy_stream(static_cast<Stream*>(stream));
    return kSuccess;
}
int aclrtDestroyStreamForce(void* stream) { return aclrtDestroyStream(stream); }

int aclrtStreamGetId(void* stream, int* id) {
    *id = static_cast<Stream*>(stream)->id;
    return kSuccess;
}

int aclrtStreamQuery(void* stream, int* status) {
    const int code = run_stream(static_cast<Stream*>(stream));    // time passes only when someone looks
    *status = 0;
    return code;
}

int aclrtSynchronizeStream(void* stream) { return synchronize(static_cast<Stream*>(stream)); }
int aclrtSynchronizeStreamWithTimeout(void* stream, int) { return synchronize(static_cast<Stream*>(stream)); }
int aclrtSynchronizeDevice() { return synchronize_device(); }
int aclrtSynchronizeDeviceWithTimeout(int) { return synchronize_device(); }

int aclrtLaunchHostFunc(void* stream, void (*call)(void*), void* argument) {
    Task task;
    task.kind = Kind::kHostCall;
    task.call = call;
    task.source = argument;
    push(static_cast<Stream*>(stream), std::move(task));
    return kSuccess;
}

int aclrtLaunchCallback(void (*call)(void*), void* argument, int, void* stream) {
    return aclrtLaunchHostFunc(stream, call, argument);
}

}  // extern "C"
}  // namespace standin
