// Events, and values in device memory that streams wait for.
//
// An ordinary event is a ticket: a wait is for the record that was the latest when the wait was queued. An external
// event is a flag on the device, which a record sets and a reset clears, whenever they run: a captured wait for one
// holds at every replay until somebody records it. Inside a capture an ordinary event joins two lanes of the graph.

#include <algorithm>

#include "device.h"

namespace standin {

extern "C" {

static void* new_event(bool external) {
    auto* event = new std::shared_ptr<Event>(std::make_shared<Event>());
    (*event)->external = external;
    return event;
}

int aclrtCreateEventExWithFlag(void** event, uint32_t flag) {
    *event = new_event((flag & 0x20u) != 0);
    return kSuccess;
}

int aclrtCreateEventWithFlag(void** event, uint32_t) {
    *event = new_event(true);
    return kSuccess;
}

int aclrtDestroyEvent(void* event) {
    delete static_cast<std::shared_ptr<Event>*>(event);
    return kSuccess;
}

int aclrtRecordEvent(void* handle, void* stream_handle) {
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    auto* stream = static_cast<Stream*>(stream_handle);
    Task task;
    task.event = event;
    count("events_recorded");
    if (event->external) {
        task.kind = Kind::kFlagRecord;
        push(stream, std::move(task));
        return kSuccess;
    }
    {
        auto guard = lock_queues();
        static uint64_t tickets = 0;
        event->recorded = ++tickets;
        event->stream = stream;
        event->capture = stream->capture.get();
        if (stream->capture) {
            event->lane = stream->capture->lane_of[stream];
            event->position = stream->capture->lanes[event->lane].size();
            return kSuccess;
        }
        task.kind = Kind::kRecord;
        task.ticket = event->recorded;
    }
    push(stream, std::move(task));
    return kSuccess;
}

int aclrtResetEvent(void* handle, void* stream) {
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    if (!event->external) return kSuccess;
    Task task;
    task.kind = Kind::kFlagReset;
    task.event = event;
    push(static_cast<Stream*>(stream), std::move(task));
    return kSuccess;
}

int aclrtStreamWaitEvent(void* stream_handle, void* handle) {
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    auto* stream = static_cast<Stream*>(stream_handle);
    Task task;
    task.event = event;
    count("event_waits");
    {
        auto guard = lock_queues();
        if (event->external) {
            task.kind = Kind::kFlagWait;
        } else if (event->recorded == 0) {
            return kSuccess;
        } else if (event->capture) {
            const std::shared_ptr<Graph> owner = open_capture(event->capture);
            if (!owner) {
                return fail(kEventCaptured, "stream wait event: the event was recorded inside a capture");
            }
            Graph& graph = *owner;
            if (!stream->capture) {          // the stream joins the capture
                if (!take_stream(graph)) return no_stream(graph);
                stream->capture = owner;
                graph.lane_of[stream] = static_cast<int>(graph.lanes.size());
                graph.lanes.emplace_back();
            } else if (stream->capture.get() != &graph) {
                graph.invalid = true;
                return fail(kCaptureDependency, "stream wait event: the event belongs to another capture");
            }
            if (graph.lane_of[stream] == event->lane) return kSuccess;
            graph.joined[event->lane] = std::max(graph.joined[event->lane], event->position);
            task.kind = Kind::kJoin;
            task.value = static_cast<uint64_t>(event->lane);
            task.size = event->position;
        } else if (stream->capture) {
            if (event->done >= event->recorded) return kSuccess;
            stream->capture->invalid = true;
            return fail(kCaptureDependency, "stream wait event: a captured stream waits for work outside the capture");
        } else {
            task.kind = Kind::kWait;
            task.ticket = event->recorded;
        }
    }
    push(stream, std::move(task));
    return kSuccess;
}

int aclrtSynchronizeEvent(void* handle) {
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    count("event_syncs");
    if (event->capture) return fail(kEventCaptured, "event synchronize: the event was recorded inside a capture");
    return run_event(*event, event->recorded);
}

int aclrtQueryEventStatus(void* handle, int* status) {
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    if (event->capture) return fail(kEventCaptured, "event query: the event was recorded inside a capture");
    const int code = run_event(*event, event->recorded);     // time passes only when someone looks
    *status = 1;
    return code;
}

int aclrtQueryEventWaitStatus(void* handle, int* status) {
    (void)handle;
    *status = 0;
    return kSuccess;
}

int aclrtEventElapsedTime(float* ms, void* start, void* end) {
    const Event& first = **static_cast<std::shared_ptr<Event>*>(start);
    const Event& last = **static_cast<std::shared_ptr<Event>*>(end);
    *ms = static_cast<float>((last.time - first.time) * 1e3);
    return kSuccess;
}

int aclrtValueWrite(void* address, uint64_t value, uint32_t, void* stream) {
    Task task;
    task.kind = Kind::kValueWrite;
    task.target = address;
    task.value = value;
    push(static_cast<Stream*>(stream), std::move(task));
    return kSuccess;
}

int aclrtValueWait(void* address, uint64_t value, uint32_t flag, void* stream) {
    Task task;
    task.kind = Kind::kValueWait;
    task.target = address;
    task.value = value;
    task.compare = flag;
    push(static_cast<Stream*>(stream), std::move(task));
    return kSuccess;
}

}  // extern "C"
}  // namespace standin
