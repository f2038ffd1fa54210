// When the simulated device does what was enqueued: the operations that have not run, and the three ways of
// choosing the next. Not locked: the device's lock is held around every call, as a Guard where it is released
// for a host function or while another thread runs one.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device/sim_memory.h"
#include "device/sim_op.h"
#include "headrace/device.h"

namespace headrace::sim {

class Schedule {
 public:
  Schedule(const SimOptions& options, std::string device, Memory& memory);
  ~Schedule();

  // `op` runs behind `former`, if that is not done, and takes over a failure that nobody was told of.
  void order(Op& op, const OpRef& former);
  // Numbers it and takes it in; everything it is ordered behind was told before.
  void add(const OpRef& op);
  // What may run now by itself, after a call of the device's.
  void advance(Guard& guard);
  // Runs what `targets` need, and waits for what other threads are running of it.
  void demand(Guard& guard, const std::vector<OpRef>& targets);
  // Everything that is pending now.
  std::vector<OpRef> everything() const;
  // The first failure behind the targets, all done, that nobody was told of; tells it and the others.
  Status tell(const std::vector<OpRef>& targets);
  Status tell_all();
  // Pending work is skipped and counts as failed; memory is still given back. Host functions that run are
  // waited for.
  void drop(Guard& guard);

  size_t pending() const { return pending_.size(); }
  // The partition of the host function that the calling thread runs.
  PartitionRef current_partition() const;

 private:
  void run(Guard& guard, const OpRef& op);
  void complete(Guard& guard, Op& op, Status status);
  OpRef pick();
  uint64_t random(uint64_t below);
  std::vector<OpRef> closure(const std::vector<OpRef>& targets);
  Status tell(std::vector<FailureRef> failures);

  SimOptions::Schedule schedule_;
  uint64_t random_state_;
  uint64_t haste_ = 0;  // eighths: how likely another operation runs after a call
  std::string device_;
  Memory& memory_;
  std::condition_variable changed_;  // an operation is done
  uint64_t last_id_ = 0;
  uint64_t last_mark_ = 0;
  int64_t clock_ns_ = 0;
  std::map<uint64_t, OpRef> pending_;  // by number; those that run now included
  std::map<uint64_t, OpRef> ready_;    // pending, with nothing before them, not held
  std::vector<FailureRef> untold_;
};

}  // namespace headrace::sim
