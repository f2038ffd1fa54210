#include "device/faults.h"

#include <algorithm>
#include <iterator>

#include "device/refusal.h"

namespace headrace {

namespace {

constexpr const char* kOperations[] = {"allocate",
                                       "free",
                                       "copy",
                                       "fill",
                                       "create_stream",
                                       "destroy_stream",
                                       "synchronize_stream",
                                       "synchronize_device",
                                       "query_stream",
                                       "call",
                                       "create_event",
                                       "record",
                                       "wait",
                                       "synchronize_event",
                                       "query_event",
                                       "elapsed_ms",
                                       "begin_capture",
                                       "end_capture",
                                       "capture_status",
                                       "instantiate",
                                       "upload",
                                       "launch",
                                       "split",
                                       "sms_seen",
                                       "work_of"};

std::string all_operations() {
  std::string out;
  for (const char* name : kOperations) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

bool is_operation(const std::string& name) {
  return std::find(std::begin(kOperations), std::end(kOperations), name) != std::end(kOperations);
}

}  // namespace

void Countdowns::add(std::string operation, int64_t left, ErrorCode code) {
  list_.push_back({std::move(operation), left, code});
}

bool Countdowns::due(const char* operation, ErrorCode* code) {
  auto found = list_.end();
  for (auto at = list_.begin(); at != list_.end(); ++at) {
    if (!at->operation.empty() && at->operation != operation) continue;
    // Of several that come at once the first is taken; the others come at the next call.
    if (at->left > 0) {
      --at->left;
    } else if (found == list_.end()) {
      found = at;
    }
  }
  if (found == list_.end()) return false;
  *code = found->code;
  list_.erase(found);
  return true;
}

Status Faults::inject(const Fault& fault) {
  if (!fault.operation.empty() && !is_operation(fault.operation))
    return refusal(ErrorCode::kInput, device_, "inject", "the name of an operation",
                   "'" + fault.operation + "'", "one of: " + all_operations());
  if (fault.at < 0 || fault.code == ErrorCode::kOk)
    return refusal(
        ErrorCode::kInput, device_, "inject", "a place from 0 and an error",
        "place " + std::to_string(fault.at) + (fault.code == ErrorCode::kOk ? " and no error" : ""),
        "say which call fails, and how");
  std::lock_guard lock(mutex_);
  faults_.add(fault.operation, fault.at, fault.code);
  return {};
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  faults_.clear();
}

Status Faults::begin(const char* operation) {
  ErrorCode code = ErrorCode::kOk;
  {
    std::lock_guard lock(mutex_);
    ++counts_[operation];
    ++counts_[""];
    if (!faults_.due(operation, &code)) return {};
  }
  return refusal(code, device_, operation, "success", "the fault that was injected",
                 "this is a test's doing");
}

int64_t Faults::count(const std::string& operation) const {
  if (!operation.empty() && !is_operation(operation)) return -1;
  std::lock_guard lock(mutex_);
  auto found = counts_.find(operation);
  return found == counts_.end() ? 0 : found->second;
}

}  // namespace headrace
