// A device made of host memory and queues: the state behind the stand-in CANN libraries.
//
// A stream is a queue of tasks that nobody runs until somebody waits for it. That is the idea of the whole model: the
// host runs a stream at a synchronisation (or where another stream's wait needs it), so work that was not waited
// for stays undone, and a missing wait shows as bytes that are not there. Tasks that compute carry a number; the
// bytes are filled by a callback into Python, which keeps what to do under that number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace standin {

// Return codes of the runtime, as its header error_codes/rt_error_codes.h numbers them.
enum Code : int {
    kSuccess = 0,
    kParamInvalid = 107000,
    kInvalidDevice = 107001,
    kStreamContext = 107003,
    kCaptureDependency = 107024,
    kStreamUnjoined = 107025,
    kStreamCaptured = 107027,
    kEventCaptured = 107028,
    kStreamNotCaptured = 107029,
    kCaptureNotSupported = 107030,
    kTaskGroupStatus = 107033,
    kModelUpdateFailed = 107040,
    kCaptureUnmatched = 107036,
    kAsyncToSync = 107041,
    kOutOfMemory = 207001,
    kNoStream = 207008,
    kInternal = 507000,
    kStreamTimeout = 507046,
    kEventTimeout = 507047,
    kCaptureInvalidated = 507903,
};

enum class Kind {
    kNothing,     // a task that was taken back
    kLaunch,      // a kernel's own launch: counted, and the place where an injected fault shows
    kStep,        // fills an operator's bytes through the callback
    kCopy,
    kSet,
    kRecord,      // of an ordinary event: the ticket it was given when it was recorded
    kWait,
    kJoin,        // of another lane of the same graph, up to a place in it
    kFlagRecord,  // of an external event: a flag in the device's memory
    kFlagWait,
    kFlagReset,
    kValueWrite,
    kValueWait,
    kGroup,       // tasks that an update may replace
    kUpdate,
    kReplay,
    kHostCall,
};

struct Event;
struct Graph;
struct Group;
struct Stream;

struct Task {
    Kind kind = Kind::kNothing;
    int64_t step = 0;                // kStep
    const char* name = nullptr;      // kLaunch, kStep
    void* target = nullptr;          // kCopy, kSet, kValue*
    const void* source = nullptr;    // kCopy, kHostCall (its argument)
    size_t size = 0;                 // bytes; kJoin: how many tasks of the lane
    uint64_t value = 0;              // kSet, kValue*, kJoin (the lane)
    uint32_t compare = 0;            // kValueWait
    uint64_t ticket = 0;             // kRecord, kWait
    uint64_t serial = 0;             // order of queueing, over all streams
    std::shared_ptr<Event> event;
    std::shared_ptr<Graph> graph;    // kReplay
    std::shared_ptr<Group> group;    // kGroup, kUpdate
    std::shared_ptr<std::vector<Task>> replacement;  // kUpdate
    std::shared_ptr<std::vector<char>> staged;       // kCopy from pageable memory: read when it was queued
    void (*call)(void*) = nullptr;   // kHostCall
};

struct Event {
    bool external = false;
    bool flag = false;              // external events
    uint64_t recorded = 0;          // ticket of the latest record that was queued
    uint64_t done = 0;              // ticket of the latest record that ran
    Stream* stream = nullptr;       // where it was recorded
    Graph* capture = nullptr;       // recorded while that graph was captured: in this lane, after so many tasks
    int lane = 0;
    size_t position = 0;
    double time = 0;                // seconds, when the latest record ran
};

struct Group {                       // what stands between the begin and the end of a task group
    std::vector<Task> tasks;
    int lane = 0;
    Graph* graph = nullptr;
};

struct Graph {
    int64_t id = 0;
    int device = 0;
    bool invalid = false;
    bool ended = false;
    int mode = 0;
    Stream* root = nullptr;
    int streams_taken = 0;
    std::vector<std::vector<Task>> lanes;        // one per captured stream, the first is the root
    std::unordered_map<Stream*, int> lane_of;    // while capturing
    std::unordered_map<int, size_t> joined;      // how far another lane waited for this one
    int groups = 0;
};

struct Stream {
    int device = 0;
    int id = 0;
    std::deque<Task> queue;
    bool running = false;            // somewhere in the chain of streams being run
    std::shared_ptr<Graph> capture;
    std::shared_ptr<Group> group;    // task group being captured
    std::shared_ptr<Group> update;   // task group being updated
    std::shared_ptr<std::vector<Task>> update_tasks;
};

// --- queues (queues.cpp) ---------------------------------------------------------------------------------------
// All queues, events and graphs are read and written under this lock; it is never held while Python runs.
std::unique_lock<std::mutex> lock_queues();
Stream* new_stream(int device);
void destroy_stream(Stream* stream);
bool is_stream(const void* handle);
uint64_t push(Stream* stream, Task task);               // its serial; onto the queue, or into what is being captured
void take_back(Stream* stream, uint64_t serial);        // a task that has not run
int run_stream(Stream* stream);                         // until its queue is empty
int run_task(Task& task, Stream* stream, bool keep);    // keep: it will run again (a graph's task)
int run_device(int device);                             // device < 0: all devices
int run_event(Event& event, uint64_t ticket);
bool is_pending(const Stream* stream);

// --- graphs (graphs.cpp; the first under its own lock, take_stream to open_capture under that of the queues) ---------------------------------------------------------------------------------------
int run_graph(Graph& graph, Stream* stream);
int forbid_while_capturing(const char* what, bool of_thread);  // an operation that a capture does not allow
bool take_stream(Graph& graph);                         // one more stream of the budget; false: none is left
int no_stream(Graph& graph);                            // the code for that; the capture is lost
std::shared_ptr<Graph> open_capture(const Graph* graph);  // if it is being captured, else nothing
void release_steps(const std::vector<Task>& tasks);

// --- memory (memory.cpp) ---------------------------------------------------------------------------------------
bool is_device_memory(const void* address);
bool is_pinned(const void* address);
size_t used_memory(int device);

// --- launches, faults, counters (launches.cpp) -----------------------------------------------------------------
int refuse(const char* kernel);                         // at the workspace call: a refusal that is due, or 0
int launch(const char* kernel, void* stream);           // counts, and queues the launch
int fault_of(const Task& task);                         // at execution: an injected code, or 0
void set_error(const std::string& message);             // what aclGetRecentErrMsg will say in this thread
int fail(int code, const std::string& message);         // set_error, and the code
void count(const char* what, int64_t amount = 1);
void note_copy(Stream* stream, uint64_t serial);        // a copy of this thread since the last mark
int call_step(int64_t step, bool keep);                 // the callback into Python
void call_release(int64_t step);

// --- configuration (device.cpp) --------------------------------------------------------------------------------
struct Configuration {
    std::string chip = "Ascend910B3";
    std::string cann = "9.1.0";
    int devices = 1;
    size_t memory_limit = size_t(8) << 30;
    int streams = 1800;
};
Configuration& configuration();
int current_device();
double now();

// An ATB setup that fails without torch_npu's task queue throws through code that has let go of Python's lock and does
// not take it back; this takes it, so that the error reaches Python instead of ending the process.
void take_python_back();

// Waits for a lock without holding Python's lock, so that a thread inside the callback can finish.
class PythonReleased {
  public:
    PythonReleased();
    ~PythonReleased();

  private:
    void* state_ = nullptr;
};

}  // namespace standin
