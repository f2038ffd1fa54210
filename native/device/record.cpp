#include "device/record.h"

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace headrace::record {

std::atomic<bool> recording_now{false};

namespace {

// By device, handle and, for a per-thread stream, thread.
using StreamKey = std::tuple<int32_t, StreamHandle, int32_t>;

struct Recorder {
  std::mutex mutex;
  int active = 0;
  uint64_t first = 1;
  std::vector<Entry> entries;
  std::vector<Touch> touches;
  std::vector<std::string> names{""};
  std::unordered_map<std::string, uint32_t> name_numbers;
  std::map<StreamKey, StreamInfo> streams;  // that can be used now, as far as they are known
  std::unordered_map<uint32_t, StreamInfo> seen;
  std::vector<CallInfo> calls;
  std::vector<IslandInfo> islands;
  std::map<uint64_t, std::vector<std::string>> labels;
  uint32_t last_stream = 0, last_call = 0, last_island = 0;

  uint32_t name_of(const std::string& name) {
    auto [at, fresh] = name_numbers.try_emplace(name, static_cast<uint32_t>(names.size()));
    if (fresh) names.push_back(name);
    return at->second;
  }
};

// Never destroyed: devices may be used while the process ends.
Recorder& recorder() {
  static auto* r = new Recorder();
  return *r;
}

// Not std::thread::id, which is used again after a thread has ended.
int32_t this_thread() {
  static std::atomic<int32_t> last{0};
  static thread_local int32_t number = 0;
  if (number == 0) number = ++last;
  return number;
}

thread_local uint32_t current_call = 0;
thread_local uint32_t current_island = 0;
thread_local int32_t current_instruction = -1;

StreamKey key_of(int32_t device_id, StreamHandle stream) {
  return {device_id, stream, stream == kPerThreadStream ? this_thread() : 0};
}

uint32_t stream_number(Recorder& r, const Device& device, StreamHandle handle) {
  StreamHandle stream = handle == 0 ? kLegacyStream : handle;
  StreamInfo& info = r.streams[key_of(device.id(), stream)];
  if (info.number == 0) {
    // A foreign stream is taken for a non-blocking one, which is ordered with less.
    info = {++r.last_stream, device.id(), device.name(), device.backend(), stream, false, -1, 0};
    if (stream == kPerThreadStream) {
      info.blocking = true;  // CUDA: the per-thread stream is a blocking one
      info.thread = this_thread();
    }
  }
  r.seen.try_emplace(info.number, info);
  return info.number;
}

uint64_t append(Recorder& r, Entry entry, std::span<const Touch> touches) {
  entry.thread = this_thread();
  entry.call = current_call;
  entry.island = current_island;
  entry.at_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  entry.first_touch = r.touches.size();
  for (const Touch& touch : touches) {
    if (touch.nbytes == 0 || touch.data == 0) continue;
    r.touches.push_back(touch);
    ++entry.touches;
  }
  r.entries.push_back(entry);
  return r.first + r.entries.size() - 1;
}

}  // namespace

uint64_t start() {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  ++r.active;
  recording_now.store(true, std::memory_order_relaxed);
  return r.first + r.entries.size();
}

Log stop(uint64_t began) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  Log log;
  log.first = began;
  auto from = static_cast<std::ptrdiff_t>(began - r.first);
  log.entries.assign(r.entries.begin() + from, r.entries.end());
  size_t skipped = log.entries.empty() ? r.touches.size() : log.entries.front().first_touch;
  log.touches.assign(r.touches.begin() + static_cast<std::ptrdiff_t>(skipped), r.touches.end());
  for (Entry& entry : log.entries) entry.first_touch -= skipped;
  log.names = r.names;
  for (const auto& [number, info] : r.seen) log.streams.push_back(info);
  log.calls = r.calls;
  log.islands = r.islands;
  for (const auto& [instance, values] : r.labels) log.labels.push_back({instance, values});
  if (--r.active > 0) return log;
  recording_now.store(false, std::memory_order_relaxed);
  r.first += r.entries.size();
  r.entries = {};
  r.touches = {};
  r.names = {""};
  r.name_numbers.clear();
  r.seen.clear();
  r.calls = {};
  r.islands = {};
  r.labels.clear();
  return log;
}

uint64_t add(const Device* device, Kind kind, StreamHandle stream, uint64_t object,
             std::span<const Touch> touches, uint64_t other, const char* name) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  if (r.active == 0) return 0;
  Entry entry;
  entry.kind = kind;
  entry.object = object;
  entry.other = other;
  if (device != nullptr) entry.stream = stream_number(r, *device, stream);
  if (name != nullptr) entry.name = r.name_of(name);
  return append(r, entry, touches);
}

void remember_stream(const Device& device, StreamHandle stream, bool blocking, int sm_count) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  r.streams[key_of(device.id(), stream)] = {
      ++r.last_stream, device.id(), device.name(), device.backend(), stream, blocking, -1, sm_count};
}

StreamInfo forget_stream(const Device& device, StreamHandle stream) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  auto known = r.streams.extract(key_of(device.id(), stream));
  return known.empty() ? StreamInfo() : std::move(known.mapped());
}

void remember_stream(StreamInfo info) {
  if (info.number == 0) return;
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  r.streams.insert_or_assign(key_of(info.device_id, info.handle), std::move(info));
}

void forget_streams(int32_t device_id) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  std::erase_if(r.streams, [&](const auto& item) { return std::get<0>(item.first) == device_id; });
}

Operation::Operation(const Device& device, StreamHandle stream, const std::vector<Access>& accesses)
    : number_(0) {
  if (!recording()) return;
  std::vector<Touch> touches;
  touches.reserve(accesses.size());
  for (const Access& access : accesses) touches.push_back(touch(access.data, access.nbytes, access.write));
  number_ = add(&device, Kind::kCall, stream, 0, touches);
}

// ---- calls and islands

CallScope::CallScope(const Device& device, StreamHandle stream, const std::string& method, uint64_t instance)
    : instance_(instance), former_call_(current_call), former_island_(std::exchange(current_island, 0)) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  if (r.active == 0) return;
  current_call = ++r.last_call;
  r.calls.push_back({current_call, method, instance});
  named_ = r.labels.contains(instance);
  Entry entry;
  entry.kind = Kind::kBeginCall;
  entry.stream = stream_number(r, device, stream);
  append(r, entry, {});
}

CallScope::~CallScope() {
  if (current_call != former_call_) (void)add(nullptr, Kind::kEndCall, 0, current_call, {});
  current_call = former_call_;
  current_island = former_island_;
}

void CallScope::name_values(std::vector<std::string> values) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  if (r.active != 0) r.labels.try_emplace(instance_, std::move(values));
}

IslandScope::IslandScope(const Device& device, StreamHandle stream, const std::string& delegate,
                         int32_t instruction, std::span<const Touch> touches)
    : device_(&device), stream_(stream) {
  Recorder& r = recorder();
  std::lock_guard lock(r.mutex);
  former_ = current_island;
  former_instruction_ = current_instruction;
  inner_ = current_island != 0 && current_instruction == instruction;
  if (r.active == 0) return;
  if (!inner_) {
    current_island = ++r.last_island;
    current_instruction = instruction;
    r.islands.push_back({current_island, delegate, instruction});
  }
  Entry entry;
  entry.kind = Kind::kBeginIsland;
  entry.stream = stream_number(r, device, stream);
  append(r, entry, touches);
}

IslandScope::~IslandScope() {
  if (inner_) return;
  if (current_island != former_) (void)add(device_, Kind::kEndIsland, stream_, current_island, {});
  current_island = former_;
  current_instruction = former_instruction_;
}

}  // namespace headrace::record
