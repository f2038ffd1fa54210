/* A program in C that uses the small library alone. */
#include <headrace/caller_stream.h>
#include <stdio.h>

int main(void) {
  headrace_selection next = {0, -1, 1};
  headrace_selection former = headrace_exchange_selection(next);
  printf("%d %d %d\n", headrace_stream_abi() == HEADRACE_STREAM_ABI, former.selected,
         headrace_get_selection().stream != 0);
  return 0;
}
