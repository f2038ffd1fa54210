#include "device/sim_calls.h"

#include <algorithm>
#include <iterator>

#include "device/refusal.h"

namespace headrace::sim {

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
                                       "split"};

std::string all_operations() {
  std::string out;
  for (const char* name : kOperations) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

bool is_operation(const std::string& name) {
  return std::find(std::begin(kOperations), std::end(kOperations), name) != std::end(kOperations);
}

}  // namespace

Status Calls::inject(const SimFault& fault) {
  if (!fault.operation.empty() && !is_operation(fault.operation))
    return refusal(ErrorCode::kInput, device_, "inject", "the name of an operation",
                   "'" + fault.operation + "'", "one of: " + all_operations());
  if (fault.at < 0 || fault.code == ErrorCode::kOk)
    return refusal(
        ErrorCode::kInput, device_, "inject", "a place from 0 and an error",
        "place " + std::to_string(fault.at) + (fault.code == ErrorCode::kOk ? " and no error" : ""),
        "say which call fails, and how");
  faults_.push_back({fault.operation, fault.at, fault.code});
  return {};
}

Status Calls::delay(const std::string& operation, int64_t at) {
  bool can = operation == "copy" || operation == "fill" || operation == "call" || operation == "launch";
  if (!can || at < 0)
    return refusal(ErrorCode::kInput, device_, "delay", "copy, fill, call or launch, and a place from 0",
                   "'" + operation + "' and place " + std::to_string(at), "name work that can be held back");
  delays_.push_back({operation, at, ErrorCode::kOk});
  return {};
}

void Calls::clear_faults() {
  faults_.clear();
  delays_.clear();
}

bool Calls::due(std::vector<Countdown>& countdowns, const char* operation, ErrorCode* code) {
  auto found = countdowns.end();
  for (auto at = countdowns.begin(); at != countdowns.end(); ++at) {
    if (!at->operation.empty() && at->operation != operation) continue;
    // Of several that come at once the first is taken; the others come at the next call.
    if (at->left > 0) {
      --at->left;
    } else if (found == countdowns.end()) {
      found = at;
    }
  }
  if (found == countdowns.end()) return false;
  *code = found->code;
  countdowns.erase(found);
  return true;
}

Status Calls::begin(const char* operation, uint64_t thread) {
  ++counts_[operation];
  ++counts_[""];
  submissions_.emplace_back(thread_number(thread), operation);
  if (submissions_.size() > kMostSubmissions) submissions_.pop_front();
  ErrorCode code = ErrorCode::kOk;
  if (!due(faults_, operation, &code)) return {};
  return refusal(code, device_, operation, "success", "the fault that was injected",
                 "this is a test's doing");
}

bool Calls::delayed(const char* operation) {
  ErrorCode code = ErrorCode::kOk;
  return due(delays_, operation, &code);
}

int Calls::thread_number(uint64_t thread) {
  return threads_.try_emplace(thread, static_cast<int>(threads_.size())).first->second;
}

int64_t Calls::count(const std::string& operation) const {
  if (!operation.empty() && !is_operation(operation)) return -1;
  auto found = counts_.find(operation);
  return found == counts_.end() ? 0 : found->second;
}

std::vector<std::pair<int, std::string>> Calls::submissions() const {
  return {submissions_.begin(), submissions_.end()};
}

}  // namespace headrace::sim
