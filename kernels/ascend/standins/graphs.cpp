// Captured graphs: lanes of tasks (one per captured stream), task groups and their update.
//
// While a stream is captured its tasks go to a lane of the graph and do not run. A replay is one task of the stream
// it is started on; it runs the root lane, and another lane only as far as a join asks for, so a fork that was not
// joined is not seen. Every lane and every task group takes a stream of the device from a budget.

#include <algorithm>
#include <atomic>

#include "device.h"

namespace standin {
namespace {

std::unordered_map<void*, std::shared_ptr<Graph>> graphs;      // by handle
std::unordered_map<void*, std::shared_ptr<Group>> task_groups;
std::unordered_map<int, int> taken;                            // streams of the budget, by device
std::vector<Graph*> captures;                                  // under way
thread_local int exchange_mode = 0;                            // capture mode of this thread
thread_local Graph* begun_here = nullptr;

}  // namespace

bool take_stream(Graph& graph) {
    if (taken[graph.device] >= configuration().streams) return false;
    ++taken[graph.device];
    ++graph.streams_taken;
    return true;
}

int no_stream(Graph& graph) {
    graph.invalid = true;
    return fail(kNoStream,
                "EL0009: Insufficient stream resources. alloc sq cq fail: all " +
                    std::to_string(configuration().streams) +
                    " streams that captured graphs may take are taken.");
}

std::shared_ptr<Graph> open_capture(const Graph* graph) {
    auto found = graphs.find(const_cast<Graph*>(graph));
    return found == graphs.end() || found->second->ended ? nullptr : found->second;
}

namespace {

struct Replay {
    Graph& graph;
    Stream* stream;
    std::vector<size_t> position;

    int advance(size_t lane, size_t upto) {
        while (position[lane] < upto) {
            Task task = graph.lanes[lane][position[lane]++];
            const int code = task.kind == Kind::kJoin ? advance(task.value, task.size)
                                                      : run_task(task, stream, true);
            if (code != kSuccess) return code;
        }
        return kSuccess;
    }
};

bool same_launches(const std::vector<Task>& old, const std::vector<Task>& updated) {
    std::vector<std::string> before, after;
    for (const Task& task : old) if (task.kind == Kind::kLaunch) before.emplace_back(task.name);
    for (const Task& task : updated) if (task.kind == Kind::kLaunch) after.emplace_back(task.name);
    return before == after;
}

}  // namespace

int run_graph(Graph& graph, Stream* stream) {
    Replay replay{graph, stream, std::vector<size_t>(graph.lanes.size(), 0)};
    for (size_t lane = 0; lane < graph.lanes.size(); ++lane) {
        if (const int code = replay.advance(lane, graph.lanes[lane].size())) return code;
    }
    return kSuccess;
}

void release_steps(const std::vector<Task>& tasks) {
    for (const Task& task : tasks) {
        if (task.kind == Kind::kStep) call_release(task.step);
        if (task.kind == Kind::kGroup) release_steps(task.group->tasks);
    }
}

int forbid_while_capturing(const char* what, bool of_thread) {
    auto guard = lock_queues();
    for (Graph* graph : captures) {
        const int mode = exchange_mode > graph->mode ? exchange_mode : graph->mode;
        if (mode == 2 || (mode == 1 && begun_here != graph && of_thread)) continue;
        graph->invalid = true;
        return fail(kCaptureNotSupported, std::string("EE9999: ") + what +
                                              " is not permitted while a stream is captured (capture mode " +
                                              (mode == 0 ? "global" : "thread_local") + ").");
    }
    return kSuccess;
}

extern "C" {

int aclmdlRICaptureBegin(void* handle, int mode) {
    auto* stream = static_cast<Stream*>(handle);
    if (!is_stream(handle)) return fail(kStreamContext, "capture begin: not a stream of this device");
    if (stream->capture) return fail(kStreamCaptured, "capture begin: the stream is captured already");
    static std::atomic<int64_t> ids{0};
    auto graph = std::make_shared<Graph>();
    graph->id = ++ids;
    graph->device = stream->device;
    graph->mode = mode;
    graph->root = stream;
    auto guard = lock_queues();
    if (!take_stream(*graph)) return no_stream(*graph);
    graph->lanes.emplace_back();
    graph->lane_of[stream] = 0;
    stream->capture = graph;
    captures.push_back(graph.get());
    begun_here = graph.get();
    graphs[graph.get()] = graph;
    return kSuccess;
}

int aclmdlRICaptureGetInfo(void* handle, int* status, void** model) {
    if (!is_stream(handle)) return fail(kStreamContext, "capture info: not a stream of this device");
    auto guard = lock_queues();
    auto* stream = static_cast<Stream*>(handle);
    if (status) *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    if (model) *model = stream->capture ? stream->capture.get() : nullptr;
    return kSuccess;
}

int aclmdlRICaptureEnd(void* handle, void** model) {
    auto* stream = static_cast<Stream*>(handle);
    if (!is_stream(handle) || !stream->capture) return fail(kStreamNotCaptured, "capture end: nothing is captured");
    auto guard = lock_queues();
    std::shared_ptr<Graph> graph = stream->capture;
    if (graph->root != stream) return fail(kCaptureUnmatched, "capture end: the capture began in another stream");
    int code = kSuccess;
    for (const auto& [other, lane] : graph->lane_of) {
        if (lane != 0 && graph->joined[lane] < graph->lanes[lane].size()) {
            code = fail(kStreamUnjoined, "capture end: stream " + std::to_string(other->id) +
                                             " took part in the capture and was not joined to it again");
        }
        other->capture.reset();
        other->group.reset();
    }
    for (size_t place = 0; place < captures.size(); ++place) {
        if (captures[place] == graph.get()) captures.erase(captures.begin() + place--);
    }
    if (begun_here == graph.get()) begun_here = nullptr;
    graph->ended = true;
    if (model) *model = graph.get();
    if (graph->invalid && code == kSuccess) {
        code = fail(kCaptureInvalidated, "capture end: an operation that a capture forbids invalidated it");
    }
    if (code != kSuccess) {
        taken[graph->device] -= graph->streams_taken;
        graph->streams_taken = 0;
        if (model) *model = nullptr;
        graphs.erase(graph.get());
    }
    return code;
}

int aclmdlRICaptureThreadExchangeMode(int* mode) {
    std::swap(*mode, exchange_mode);
    return kSuccess;
}

int aclmdlRIExecuteAsync(void* model, void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    Task task;
    task.kind = Kind::kReplay;
    {
        auto guard = lock_queues();
        auto found = graphs.find(model);
        if (found == graphs.end()) return fail(kParamInvalid, "model execute: not a captured graph");
        task.graph = found->second;
    }
    count("replays");
    push(stream, std::move(task));
    return kSuccess;
}

int aclmdlRIDestroy(void* model) {
    std::shared_ptr<Graph> graph;
    {
        auto guard = lock_queues();
        auto found = graphs.find(model);
        if (found == graphs.end()) return kSuccess;
        graph = found->second;
        graphs.erase(found);
        taken[graph->device] -= graph->streams_taken;
        for (auto group = task_groups.begin(); group != task_groups.end();) {
            group = group->second->graph == graph.get() ? task_groups.erase(group) : std::next(group);
        }
    }
    run_device(graph->device);           // a replay may be queued
    for (const auto& lane : graph->lanes) release_steps(lane);
    return kSuccess;
}

int aclmdlRIGetId(void* model, uint32_t* id) {
    *id = static_cast<uint32_t>(static_cast<Graph*>(model)->id);
    return kSuccess;
}

int aclmdlRICaptureTaskGrpBegin(void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    auto guard = lock_queues();
    if (!stream->capture) return fail(kStreamNotCaptured, "task group begin: the stream is not captured");
    if (stream->group) return fail(kTaskGroupStatus, "task group begin: a task group is open");
    if (!take_stream(*stream->capture)) return no_stream(*stream->capture);
    stream->group = std::make_shared<Group>();
    stream->group->graph = stream->capture.get();
    return kSuccess;
}

int aclmdlRICaptureTaskGrpEnd(void* handle, void** group) {
    auto* stream = static_cast<Stream*>(handle);
    Task task;
    {
        auto guard = lock_queues();
        if (!stream->group) return fail(kTaskGroupStatus, "task group end: no task group is open");
        task.kind = Kind::kGroup;
        task.group = std::move(stream->group);
        stream->group.reset();
        task_groups[task.group.get()] = task.group;
        *group = task.group.get();
    }
    push(stream, std::move(task));
    return kSuccess;
}

int aclmdlRICaptureTaskUpdateBegin(void* handle, void* group) {
    auto* stream = static_cast<Stream*>(handle);
    auto guard = lock_queues();
    auto found = task_groups.find(group);
    if (found == task_groups.end()) return fail(kTaskGroupStatus, "task update begin: not a task group");
    if (stream->update || stream->capture) return fail(kTaskGroupStatus, "task update begin: the stream is busy");
    stream->update = found->second;
    stream->update_tasks = std::make_shared<std::vector<Task>>();
    count("update_began_us", static_cast<int64_t>(now() * 1e6));
    return kSuccess;
}

int aclmdlRICaptureTaskUpdateEnd(void* handle) {
    auto* stream = static_cast<Stream*>(handle);
    Task task;
    {
        auto guard = lock_queues();
        if (!stream->update) return fail(kTaskGroupStatus, "task update end: no update is open");
        task.kind = Kind::kUpdate;
        task.group = std::move(stream->update);
        task.replacement = std::move(stream->update_tasks);
        stream->update.reset();
        stream->update_tasks.reset();
    }
    count("graph_updates");
    count("update_ended_us", static_cast<int64_t>(now() * 1e6));
    if (!same_launches(task.group->tasks, *task.replacement)) {
        return fail(kModelUpdateFailed, "task update end: the update launches other kernels than the capture did");
    }
    push(stream, std::move(task));
    return kSuccess;
}

}  // extern "C"
}  // namespace standin
