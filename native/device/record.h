// The record: what was asked of every device of the process, by which thread, in which order, and what the
// methods around it said they read and write. src/headrace/ordering judges it; this file only writes it down.
//
// Off, every hook is one relaxed load. On, an operation is written down before it is enqueued, so an
// operation that returned before another began stands before it; operations of two threads that overlap in
// time stand in either order. A host wait is written down twice: when it begins, which says what it waits
// for, and when it is over. What was refused is marked afterwards.
//
// Nothing here calls into a device, takes the interpreter's lock or waits for anything but its own mutex.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "headrace/device.h"

namespace headrace::record {

enum class Kind : uint8_t {
  // On a stream.
  kAllocate,
  kFree,
  kCopy,
  kFill,
  kCall,
  kRecord,        // object: the event
  kWait,          // object: the event
  kLaunch,        // object: the executable graph
  kBeginCapture,  // until its end, what is enqueued on the stream runs at launches only
  kEndCapture,    // object: the graph; 0: it failed
  kInstantiate,   // object: the executable graph; other: the graph
  // On the host.
  kSynchronizeStream,
  kSynchronizeEvent,  // object: the event
  kSynchronizeDevice,
  kQueryStream,
  kQueryEvent,  // object: the event
  kDone,        // object: the wait that is over, or the query whose answer was yes
  kRefused,     // object: the operation that was not done
  kTouch,       // the host read or wrote memory; `name` says for what
  // Around operations.
  kBeginCall,
  kEndCall,
  kBeginIsland,  // its touches are the island's inputs and outputs
  kEndIsland,
  kUnseen,  // `name` says what is out of the record's sight
  kGone,    // its touch was memory of a device, and may be anything's from now on: the host's, on `sim`
};

// A stretch of memory. `value` is the method's value that lies there; -1: none.
struct Touch {
  uintptr_t data = 0;
  uint64_t nbytes = 0;
  bool write = false;
  int32_t value = -1;
};

// Streams, not handles: a driver uses handles again. Numbers are never used again.
struct StreamInfo {
  uint32_t number = 0;
  int32_t device_id = -1;
  std::string device;
  Backend backend = Backend::kCpu;
  StreamHandle handle = 0;
  bool blocking = false;  // the legacy stream and this one order each other
  int32_t thread = -1;    // whose per-thread stream it is
  int sm_count = 0;       // of its partition; 0: the whole device
};

struct Entry {
  Kind kind = Kind::kUnseen;
  int32_t thread = 0;
  uint32_t stream = 0;  // 0: none
  uint32_t call = 0;    // the innermost call that the thread was in; 0: none
  uint32_t island = 0;  // and the innermost island of that call
  uint32_t name = 0;    // index into names
  uint64_t object = 0;
  uint64_t other = 0;
  int64_t at_ns = 0;  // of the host's steady clock
  uint64_t first_touch = 0;
  uint32_t touches = 0;
};

struct CallInfo {
  uint32_t number = 0;
  std::string method;
  uint64_t instance = 0;  // copies of a method have memory of their own
};

struct IslandInfo {
  uint32_t number = 0;
  std::string delegate;
  int32_t instruction = -1;
};

// What a value of a method is called, by instance.
struct Labels {
  uint64_t instance = 0;
  std::vector<std::string> values;
};

struct Log {
  uint64_t first = 1;  // number of the first entry
  std::vector<Entry> entries;
  std::vector<Touch> touches;
  std::vector<std::string> names;
  std::vector<StreamInfo> streams;
  std::vector<CallInfo> calls;
  std::vector<IslandInfo> islands;
  std::vector<Labels> labels;
};

// ---- reading it

// Starts writing down; records nest. Returns where this one begins.
HEADRACE_API uint64_t start();
// Ends the record that began there, and copies it out. The last one to end stops the writing.
HEADRACE_API Log stop(uint64_t began);

// ---- writing it

HEADRACE_API extern std::atomic<bool> recording_now;
inline bool recording() { return recording_now.load(std::memory_order_relaxed); }

// Returns the entry's number, from 1; 0: nothing is being recorded.
HEADRACE_API uint64_t add(const Device* device, Kind kind, StreamHandle stream, uint64_t object,
                          std::span<const Touch> touches, uint64_t other = 0, const char* name = nullptr);
inline void after(Kind kind, uint64_t number) {
  if (number != 0) (void)add(nullptr, kind, 0, number, {});
}

// Kept also while nothing is recorded, since a record may begin later.
void remember_stream(const Device& device, StreamHandle stream, bool blocking, int sm_count);
// Before the stream is destroyed: another may have its handle right afterwards. Undone by remembering.
StreamInfo forget_stream(const Device& device, StreamHandle stream);
void remember_stream(StreamInfo info);
void forget_streams(int32_t device_id);

inline bool succeeded(const Status& status) { return status.ok(); }
template <class T>
bool succeeded(const Result<T>& result) {
  return result.ok();
}

// Around an operation that is enqueued: `return Operation(…).end(do_copy(…))`.
class Operation {
 public:
  Operation(const Device& device, Kind kind, StreamHandle stream, uint64_t object = 0,
            std::initializer_list<Touch> touches = {})
      : number_(recording() ? add(&device, kind, stream, object, {touches.begin(), touches.size()}) : 0) {}
  Operation(const Device& device, StreamHandle stream, const std::vector<Access>& accesses);
  template <class T>
  T end(T result) {
    if (!succeeded(result)) after(Kind::kRefused, number_);
    return result;
  }

 private:
  uint64_t number_;
};

// Around a wait on the host, or a question.
class Wait {
 public:
  Wait(const Device& device, Kind kind, StreamHandle stream, uint64_t object = 0)
      : number_(recording() ? add(&device, kind, stream, object, {}) : 0) {}
  Status end(Status status) {
    // The failure of a function that a delegate enqueued is told by a wait that waited.
    bool waited = status.ok() || status.code() == ErrorCode::kDelegate;
    after(waited ? Kind::kDone : Kind::kRefused, number_);
    return status;
  }
  Result<bool> end(Result<bool> done) {
    if (done.ok() && *done) after(Kind::kDone, number_);
    return done;
  }

 private:
  uint64_t number_;
};

inline Touch touch(const void* data, size_t nbytes, bool write, int32_t value = -1) {
  return {reinterpret_cast<uintptr_t>(data), nbytes, write, value};
}

// The host touches memory now. `what` is kept.
inline void host(const char* what, std::initializer_list<Touch> touches) {
  if (recording()) (void)add(nullptr, Kind::kTouch, 0, 0, {touches.begin(), touches.size()}, 0, what);
}

// A call of a method, for its lifetime on the calling thread.
class HEADRACE_API CallScope {
 public:
  CallScope(const Device& device, StreamHandle stream, const std::string& method, uint64_t instance);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  // Whether values of the instance have names in this record; else name_values() should give them.
  bool named() const { return named_; }
  void name_values(std::vector<std::string> values);

 private:
  uint64_t instance_;
  uint32_t former_call_, former_island_;
  bool named_ = false;
};

// One delegate call, for its lifetime on the calling thread. One for the same instruction that is open
// already stays the island; the inner one knows the arguments better.
class HEADRACE_API IslandScope {
 public:
  IslandScope(const Device& device, StreamHandle stream, const std::string& delegate, int32_t instruction,
              std::span<const Touch> touches);
  ~IslandScope();
  IslandScope(const IslandScope&) = delete;
  IslandScope& operator=(const IslandScope&) = delete;

 private:
  bool inner_ = false;
  uint32_t former_ = 0;
  int32_t former_instruction_ = -1;
  const Device* device_;
  StreamHandle stream_;
};

}  // namespace headrace::record
