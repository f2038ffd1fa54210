#pragma once

#include "headrace/caller_stream.h"

namespace headrace::stream {

// The form in which a selection is kept: see headrace_exchange_selection().
headrace_selection normal(headrace_selection given);

}  // namespace headrace::stream
