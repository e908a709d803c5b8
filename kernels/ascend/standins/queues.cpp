// Streams as queues, and the one thread at a time that runs them.
//
// A task that waits for something another stream will do makes the runner run that other stream first, as far as
// needed and no further. If nothing that is queued anywhere can end the wait, the device would hang; the runner says
// so with the code of a timeout, and the rest of the stream is dropped.

#include "device.h"

#include <algorithm>
#include <cstring>

namespace standin {
namespace {

std::mutex queues;                       // guards the containers
std::recursive_mutex running;            // held by the thread that runs tasks, Python's callback included
std::vector<Stream*> streams;
std::unordered_set<const void*> live_streams;

int run_until(Stream* stream, uint64_t serial);

bool flag_is_set(const Task& task) {
    if (task.kind == Kind::kFlagWait) return task.event->flag;
    const uint64_t present = *static_cast<const volatile uint32_t*>(task.target);
    switch (task.compare & 0xF) {        // ACL_VALUE_WAIT_GEQ, _EQ, _AND, _NOR
        case 0: return static_cast<int32_t>(static_cast<uint32_t>(present) - static_cast<uint32_t>(task.value)) >= 0;
        case 1: return present == task.value;
        case 2: return (present & task.value) != 0;
        default: return (static_cast<uint32_t>(~(present | task.value))) != 0;
    }
}

bool would_set(const Task& task, const Task& wait) {
    if (wait.kind == Kind::kFlagWait) return task.kind == Kind::kFlagRecord && task.event == wait.event;
    return task.kind == Kind::kValueWrite && task.target == wait.target;
}

// Runs streams that hold a task which ends `wait`. True if the wait is over.
bool unblock(const Task& wait) {
    while (!flag_is_set(wait)) {
        Stream* helper = nullptr;
        uint64_t serial = 0;
        {
            auto guard = lock_queues();
            for (Stream* stream : streams) {
                if (stream->running) continue;
                for (const Task& task : stream->queue) {
                    if (!would_set(task, wait)) continue;
                    helper = stream;
                    serial = task.serial;
                    break;
                }
                if (helper) break;
            }
        }
        if (!helper || run_until(helper, serial + 1) != kSuccess) return false;
    }
    return true;
}

}  // namespace

int run_task(Task& task, Stream* stream, bool keep) {
    if (const int code = fault_of(task)) return code;
    switch (task.kind) {
        case Kind::kNothing:
        case Kind::kLaunch:
            return kSuccess;
        case Kind::kStep:
            return call_step(task.step, keep);
        case Kind::kCopy:
            std::memmove(task.target, task.staged ? task.staged->data() : task.source, task.size);
            return kSuccess;
        case Kind::kSet:
            std::memset(task.target, static_cast<int>(task.value), task.size);
            return kSuccess;
        case Kind::kRecord: {
            auto guard = lock_queues();
            task.event->done = std::max(task.event->done, task.ticket);
            task.event->time = now();
            return kSuccess;
        }
        case Kind::kWait: {
            if (task.event->done >= task.ticket) return kSuccess;
            return run_event(*task.event, task.ticket);
        }
        case Kind::kFlagRecord:
            task.event->flag = true;
            return kSuccess;
        case Kind::kFlagReset:
            task.event->flag = false;
            return kSuccess;
        case Kind::kValueWrite:
            *static_cast<uint32_t*>(task.target) = static_cast<uint32_t>(task.value);
            return kSuccess;
        case Kind::kFlagWait:
        case Kind::kValueWait:
            if (unblock(task)) return kSuccess;
            return fail(kStreamTimeout,
                        "EE1002: Stream synchronize timeout. The stream waits for an event that nothing queued will "
                        "record; a captured wait is ended by the update of its graph.");
        case Kind::kGroup:
            for (Task& inner : task.group->tasks) {
                if (const int code = run_task(inner, stream, true)) return code;
            }
            return kSuccess;
        case Kind::kUpdate: {
            std::vector<Task> old;
            {
                auto guard = lock_queues();
                old.swap(task.group->tasks);
                task.group->tasks = *task.replacement;
            }
            release_steps(old);
            return kSuccess;
        }
        case Kind::kJoin:                // only inside a graph, which handles it
            return kInternal;
        case Kind::kReplay:
            return run_graph(*task.graph, stream);
        case Kind::kHostCall:
            task.call(const_cast<void*>(task.source));
            return kSuccess;
    }
    return kInternal;
}

namespace {

// Runs the tasks of a stream whose serial is below `serial`. The caller holds `running`.
int run_until(Stream* stream, uint64_t serial) {
    if (stream->running) return kStreamTimeout;
    stream->running = true;
    int code = kSuccess;
    while (code == kSuccess) {
        Task task;
        {
            auto guard = lock_queues();
            if (stream->queue.empty() || stream->queue.front().serial >= serial) break;
            task = std::move(stream->queue.front());
            stream->queue.pop_front();
        }
        code = run_task(task, stream, false);
    }
    if (code != kSuccess) {              // the device abandons what stood behind the failed task
        std::deque<Task> dropped;
        {
            auto guard = lock_queues();
            dropped.swap(stream->queue);
        }
        for (const Task& task : dropped) {
            if (task.kind == Kind::kStep) call_release(task.step);
            if (task.kind == Kind::kRecord) task.event->done = std::max(task.event->done, task.ticket);
        }
    }
    stream->running = false;
    return code;
}

class Running {
  public:
    Running() {
        if (running.try_lock()) return;
        PythonReleased released;
        running.lock();
    }
    ~Running() { running.unlock(); }
};

}  // namespace

std::unique_lock<std::mutex> lock_queues() { return std::unique_lock<std::mutex>(queues); }

Stream* new_stream(int device) {
    auto guard = lock_queues();
    static int ids = 0;
    auto* stream = new Stream;
    stream->device = device;
    stream->id = ++ids;
    streams.push_back(stream);
    live_streams.insert(stream);
    return stream;
}

void destroy_stream(Stream* stream) {
    run_stream(stream);
    auto guard = lock_queues();
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
    live_streams.erase(stream);          // the record itself stays: an event may still point at it
}

bool is_stream(const void* handle) {
    auto guard = lock_queues();
    return live_streams.count(handle) != 0;
}

uint64_t push(Stream* stream, Task task) {
    auto guard = lock_queues();
    static uint64_t serials = 0;
    const uint64_t serial = task.serial = ++serials;
    if (stream->update) {
        stream->update_tasks->push_back(std::move(task));
    } else if (stream->group) {
        stream->group->tasks.push_back(std::move(task));
    } else if (stream->capture) {
        Graph& graph = *stream->capture;
        graph.lanes[graph.lane_of[stream]].push_back(std::move(task));
    } else {
        stream->queue.push_back(std::move(task));
    }
    return serial;
}

namespace {

template <typename Tasks>
void take_back_from(Tasks& tasks, uint64_t serial) {
    for (auto task = tasks.rbegin(); task != tasks.rend() && task->serial >= serial; ++task) {
        if (task->serial == serial) task->kind = Kind::kNothing;
    }
}

}  // namespace

void take_back(Stream* stream, uint64_t serial) {
    auto guard = lock_queues();
    if (stream->update) {
        take_back_from(*stream->update_tasks, serial);
    } else if (stream->group) {
        take_back_from(stream->group->tasks, serial);
    } else if (stream->capture) {
        take_back_from(stream->capture->lanes[stream->capture->lane_of[stream]], serial);
    } else {
        take_back_from(stream->queue, serial);
    }
}

bool is_pending(const Stream* stream) {
    auto guard = lock_queues();
    return !stream->queue.empty();
}

int run_stream(Stream* stream) {
    Running held;
    return run_until(stream, UINT64_MAX);
}

int run_device(int device) {
    Running held;
    std::vector<Stream*> todo;
    {
        auto guard = lock_queues();
        for (Stream* stream : streams) {
            if (device < 0 || stream->device == device) todo.push_back(stream);
        }
    }
    int first = kSuccess;
    for (Stream* stream : todo) {
        if (stream->running) continue;
        const int code = run_until(stream, UINT64_MAX);
        if (first == kSuccess) first = code;
    }
    return first;
}

int run_event(Event& event, uint64_t ticket) {
    Running held;
    if (event.done >= ticket) return kSuccess;
    Stream* stream = event.stream;
    uint64_t serial = UINT64_MAX;
    {
        auto guard = lock_queues();
        if (!stream) return kSuccess;
        for (const Task& task : stream->queue) {
            if (task.kind == Kind::kRecord && task.event.get() == &event && task.ticket >= ticket) {
                serial = task.serial;
                break;
            }
        }
    }
    if (serial == UINT64_MAX) return kSuccess;   // recorded in a stream that failed: nothing is left to wait for
    return run_until(stream, serial + 1);
}

}  // namespace standin
