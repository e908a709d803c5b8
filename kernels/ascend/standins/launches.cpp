// What was launched, what is refused, and the bridge to Python that fills the bytes.
//
// torch_npu queues its launches and runs them in another thread (TASK_QUEUE_ENABLE), so the order in which Python
// calls operators is not the order at this boundary. The bridge therefore sends its own marker through the same
// queue, right behind the operator's launches: there the launches since the last marker get the operator's name,
// copies that the operator made of bytes not yet computed are taken back, and the step that fills the result is put
// on the stream.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <set>

#include "device.h"

namespace standin {
namespace {

struct Launch {
    const char* kernel;
    const char* operation;
};

struct Injection {
    std::string kernel;
    int code;
    std::string message;
    bool at_execution;
    int times;
};

struct Refusal {
    int code = 0;
    std::string message;
};

struct NotedCopy {
    Stream* stream;
    uint64_t serial;
};

std::mutex log;
std::vector<Launch> launches;
std::map<std::string, int64_t> counters;
std::vector<Injection> injections;
std::atomic<bool> has_injections{false};
std::set<std::string> names;                       // owns every name in the log

thread_local std::vector<size_t> unnamed;          // launches of this thread since its last marker
thread_local std::vector<NotedCopy> copies;
thread_local Refusal armed;
std::atomic<int> refusals{0};                      // met since the last arming
thread_local std::string error, error_given;

int (*step_callback)(int64_t, int) = nullptr;
void (*release_callback)(int64_t) = nullptr;
int (*python_holds)() = nullptr;
void* (*python_release)() = nullptr;
void (*python_restore)(void*) = nullptr;
void* (*python_state)() = nullptr;
int (*python_take)() = nullptr;

// torch_npu's own way to put a function behind what is queued. Declared by its symbol: its headers need all of torch.
using Enqueue = void (*)(const std::string&, const std::function<int()>&, bool);
Enqueue enqueue = nullptr;

const char* keep_name(const char* name) { return names.insert(name).first->c_str(); }

int injected(const char* kernel, bool at_execution) {
    if (!has_injections) return 0;
    std::lock_guard<std::mutex> guard(log);
    for (Injection& one : injections) {
        if (one.times == 0 || one.at_execution != at_execution || one.kernel != kernel) continue;
        if (one.times > 0) --one.times;
        return fail(one.code, one.message);
    }
    return 0;
}

}  // namespace

void set_error(const std::string& message) { error = message; }

int fail(int code, const std::string& message) {
    set_error(message);
    return code;
}

void count(const char* what, int64_t amount) {
    static std::mutex only_counters;
    std::lock_guard<std::mutex> guard(only_counters);
    counters[what] += amount;
}

int refuse(const char* kernel) {
    if (armed.code) {
        ++refusals;
        return fail(armed.code, armed.message);
    }
    return injected(kernel, false);
}

int launch(const char* kernel, void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    const char* name;
    {
        std::lock_guard<std::mutex> guard(log);
        name = keep_name(kernel);
        unnamed.push_back(launches.size());
        launches.push_back(Launch{name, ""});
    }
    if (stream && is_stream(stream)) {
        Task task;
        task.kind = Kind::kLaunch;
        task.name = name;
        push(stream, std::move(task));
    }
    return kSuccess;
}

int fault_of(const Task& task) { return task.kind == Kind::kLaunch ? injected(task.name, true) : 0; }

void note_copy(Stream* stream, uint64_t serial) { copies.push_back(NotedCopy{stream, serial}); }

int call_step(int64_t step, bool keep) { return step_callback ? step_callback(step, keep) : kInternal; }

void call_release(int64_t step) {
    if (release_callback) release_callback(step);
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void take_python_back() {
    if (python_holds && !python_holds() && python_state()) python_take();
}

PythonReleased::PythonReleased() {
    if (python_holds && python_holds()) state_ = python_release();
}

PythonReleased::~PythonReleased() {
    if (state_) python_restore(state_);
}

namespace {

int mark(int64_t step, const char* operation, Stream* stream, bool fills) {
    {
        std::lock_guard<std::mutex> guard(log);
        for (size_t place : unnamed) {
            if (place < launches.size()) launches[place].operation = operation;
        }
    }
    unnamed.clear();
    if (fills) {
        for (const NotedCopy& copy : copies) take_back(copy.stream, copy.serial);
    }
    copies.clear();
    if (step) {
        Task task;
        task.kind = Kind::kStep;
        task.step = step;
        task.name = operation;
        push(stream, std::move(task));
    }
    return kSuccess;
}

}  // namespace

extern "C" {

const char* aclGetRecentErrMsg() {
    if (error.empty()) return nullptr;
    error_given.swap(error);
    error.clear();
    return error_given.c_str();
}

// --- called from Python ------------------------------------------------------------------------------------------

int standin_connect(int (*step)(int64_t, int), void (*release)(int64_t), void* holds, void* save, void* restore,
                    void* state, void* take) {
    python_state = reinterpret_cast<void* (*)()>(state);
    python_take = reinterpret_cast<int (*)()>(take);
    step_callback = step;
    release_callback = release;
    python_holds = reinterpret_cast<int (*)()>(holds);
    python_release = reinterpret_cast<void* (*)()>(save);
    python_restore = reinterpret_cast<void (*)(void*)>(restore);
    return kSuccess;
}

int standin_attach(const char* torch_npu_library, const char* enqueue_symbol) {
    void* library = dlopen(torch_npu_library, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return kInternal;
    enqueue = reinterpret_cast<Enqueue>(dlsym(library, enqueue_symbol));
    return enqueue ? kSuccess : kInternal;
}

// A marker behind what this thread has queued. `operation` must live as long as the process.
int standin_mark(int64_t step, const char* operation, void* stream, int fills, char* text, size_t room) {
    const auto body = [=]() -> int { return mark(step, operation, static_cast<Stream*>(stream), fills != 0); };
    try {
        enqueue(operation, body, false);
        return kSuccess;
    } catch (const std::exception& failure) {
        std::string what = failure.what();
        what.resize(std::min(what.size(), room - 1));
        what.copy(text, what.size());
        text[what.size()] = 0;
        return kInternal;
    }
}

// Refuses workspace calls of this thread, and of the thread that runs its queue, until `standin_disarm`.
int standin_arm(int code, const char* message) {
    const Refusal refusal{code, message};
    armed = refusal;
    refusals = 0;
    try {
        enqueue("refusal", [refusal]() -> int { armed = refusal; return kSuccess; }, false);
    } catch (const std::exception&) {
        return kInternal;                 // an earlier failure is reported by the next operator as well
    }
    return kSuccess;
}

int standin_disarm() {
    armed = Refusal{};
    try {
        enqueue("refusal", []() -> int { armed = Refusal{}; return kSuccess; }, false);
    } catch (const std::exception&) {
        return kInternal;                 // the queue reports what was refused in it
    }
    return kSuccess;
}

// Whether torch_npu's queue still runs what is put into it: after a failure it drops everything without a word.
// Python calls begin, waits for the queue, and asks.
static thread_local std::shared_ptr<std::atomic<bool>> probe;

int standin_probe_begin() {
    auto arrived = std::make_shared<std::atomic<bool>>(false);
    probe = arrived;
    try {
        enqueue("probe", [arrived]() -> int { *arrived = true; return kSuccess; }, false);
    } catch (const std::exception&) {
        return kInternal;
    }
    return kSuccess;
}

int standin_probe_arrived() { return probe && *probe; }

int standin_refusals() { return refusals; }

void standin_set_error(const char* message) { set_error(message); }

void standin_note_launch(const char* kernel, void* stream) { launch(kernel, stream); }

const char* standin_name(const char* name) {
    std::lock_guard<std::mutex> guard(log);
    return keep_name(name);
}

int64_t standin_launch_count() {
    std::lock_guard<std::mutex> guard(log);
    return static_cast<int64_t>(launches.size());
}

void standin_launch_at(int64_t place, const char** kernel, const char** operation) {
    std::lock_guard<std::mutex> guard(log);
    *kernel = launches[place].kernel;
    *operation = launches[place].operation;
}

void standin_inject(const char* kernel, int code, const char* message, int at_execution, int times) {
    std::lock_guard<std::mutex> guard(log);
    injections.push_back(Injection{kernel, code, message, at_execution != 0, times});
    has_injections = true;
}

void standin_reset() {
    std::lock_guard<std::mutex> guard(log);
    launches.clear();
    unnamed.clear();
    counters.clear();
    injections.clear();
    has_injections = false;
}


// Every counter as lines "name value".
size_t standin_counters(char* text, size_t room) {
    std::string lines;
    for (const auto& [name, amount] : counters) lines += name + " " + std::to_string(amount) + "\n";
    if (lines.size() + 1 <= room) {
        lines.copy(text, lines.size());
        text[lines.size()] = 0;
    }
    return lines.size() + 1;
}

}  // extern "C"
}  // namespace standin
