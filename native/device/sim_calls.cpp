#include "device/sim_calls.h"

#include "device/refusal.h"

namespace headrace::sim {

Status Calls::delay(const std::string& operation, int64_t at) {
  bool can = operation == "copy" || operation == "fill" || operation == "call" || operation == "launch";
  if (!can || at < 0)
    return refusal(ErrorCode::kInput, device_, "delay", "copy, fill, call or launch, and a place from 0",
                   "'" + operation + "' and place " + std::to_string(at), "name work that can be held back");
  delays_.add(operation, at, ErrorCode::kOk);
  return {};
}

void Calls::note(const char* operation, uint64_t thread) {
  submissions_.emplace_back(thread_number(thread), operation);
  if (submissions_.size() > kMostSubmissions) submissions_.pop_front();
}

bool Calls::delayed(const char* operation) {
  ErrorCode code = ErrorCode::kOk;
  return delays_.due(operation, &code);
}

int Calls::thread_number(uint64_t thread) {
  return threads_.try_emplace(thread, static_cast<int>(threads_.size())).first->second;
}

std::vector<std::pair<int, std::string>> Calls::submissions() const {
  return {submissions_.begin(), submissions_.end()};
}

}  // namespace headrace::sim
