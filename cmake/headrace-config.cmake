# headrace for CMake projects, from the folder that pip installed:
#
#   find_package(headrace REQUIRED COMPONENTS caller_stream headrace cuda)
#
# Components are targets; what one needs comes with it, and without COMPONENTS all are made.
#
#   headrace::caller_stream  the thread's selected stream; needs the C library alone (headrace/caller_stream.h)
#   headrace::headrace       devices and programs, with the engine's CPU kernels and XNNPACK (headrace/program.h)
#   headrace::cuda           the delegate CudaBackend: linking it registers it
#   headrace::executorch     the engine's run time and headers, for delegates in C++ and users of its Module
#
# headrace_LIBRARY_DIR is the folder of the libraries. Everything is found from this file, so the folder may be moved as a
# whole. Programs that CMake builds find the libraries where they are now; installed ones as INSTALL_RPATH says.

cmake_minimum_required(VERSION 3.16)

get_filename_component(_headrace_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(headrace_LIBRARY_DIR "${_headrace_root}/lib")
set(headrace_INCLUDE_DIR "${_headrace_root}/include")

set(_headrace_components caller_stream headrace cuda executorch)
# The libraries of each, its own first, and the header that proves the folder whole.
set(_headrace_files_caller_stream lib/libheadrace_stream.so include/headrace/caller_stream.h)
set(_headrace_files_executorch
  lib/libexecutorch.so lib/libexecutorch_threadpool.so include/engine/executorch/runtime/backend/interface.h)
set(_headrace_files_headrace
  lib/libheadrace.so lib/libexecutorch.so lib/libexecutorch_threadpool.so lib/libexecutorch_kernels_optimized.so
  lib/libexecutorch_backend_xnnpack.so include/headrace/program.h)
set(_headrace_files_cuda lib/libheadrace_cuda.so lib/libheadrace_shims.so)
set(_headrace_needs_headrace caller_stream)
set(_headrace_needs_cuda headrace caller_stream)

set(_headrace_wanted ${headrace_FIND_COMPONENTS})
if(NOT _headrace_wanted)
  set(_headrace_wanted ${_headrace_components})
  set(_headrace_all TRUE)
endif()

set(headrace_FOUND TRUE)
set(_headrace_problems "")
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  string(APPEND _headrace_problems
    "\n  expected Linux on x86_64, got ${CMAKE_SYSTEM_NAME} on ${CMAKE_SYSTEM_PROCESSOR}")
endif()
foreach(_headrace_component IN LISTS _headrace_wanted)
  set(headrace_${_headrace_component}_FOUND TRUE)
  if(NOT _headrace_component IN_LIST _headrace_components)
    set(headrace_${_headrace_component}_FOUND FALSE)
    list(JOIN _headrace_components ", " _headrace_text)
    set(_headrace_problem
      "component '${_headrace_component}': expected one of ${_headrace_text}, got another name")
  else()
    foreach(_headrace_part IN LISTS _headrace_component _headrace_needs_${_headrace_component})
      foreach(_headrace_file IN LISTS _headrace_files_${_headrace_part})
        if(headrace_${_headrace_component}_FOUND AND NOT EXISTS "${_headrace_root}/${_headrace_file}")
          set(headrace_${_headrace_component}_FOUND FALSE)
          set(_headrace_problem
            "component '${_headrace_component}': expected ${_headrace_root}/${_headrace_file}, got no such file; install headrace again")
        endif()
      endforeach()
    endforeach()
  endif()
  if(NOT headrace_${_headrace_component}_FOUND AND (_headrace_all OR headrace_FIND_REQUIRED_${_headrace_component}))
    string(APPEND _headrace_problems "\n  ${_headrace_problem}")
  endif()
endforeach()
if(_headrace_problems)
  set(headrace_FOUND FALSE)
  set(headrace_NOT_FOUND_MESSAGE "headrace in ${_headrace_root}:${_headrace_problems}")
  return()
endif()

get_property(_headrace_languages GLOBAL PROPERTY ENABLED_LANGUAGES)

# One shared library, and the folders of its headers.
function(_headrace_library name file standard)
  if(TARGET headrace::${name} OR NOT EXISTS "${headrace_LIBRARY_DIR}/${file}")
    return()
  endif()
  add_library(headrace::${name} SHARED IMPORTED)
  set_target_properties(headrace::${name} PROPERTIES
    IMPORTED_LOCATION "${headrace_LIBRARY_DIR}/${file}"
    IMPORTED_SONAME "${file}"
    INTERFACE_INCLUDE_DIRECTORIES "${ARGN}")
  if("CXX" IN_LIST _headrace_languages)
    set_target_properties(headrace::${name} PROPERTIES INTERFACE_COMPILE_FEATURES ${standard})
  endif()
endfunction()

_headrace_library(caller_stream libheadrace_stream.so cxx_std_17 "${headrace_INCLUDE_DIR}")
_headrace_library(executorch libexecutorch.so cxx_std_17
  "${headrace_INCLUDE_DIR}/engine" "${headrace_INCLUDE_DIR}/engine/executorch/runtime/core/portable_type/c10")
_headrace_library(headrace libheadrace.so cxx_std_20 "${headrace_INCLUDE_DIR}")
_headrace_library(cuda libheadrace_cuda.so cxx_std_20 "${headrace_INCLUDE_DIR}")

if(TARGET headrace::executorch)
  # As the engine was built: its headers need the first, the others change layouts.
  set_target_properties(headrace::executorch PROPERTIES INTERFACE_COMPILE_DEFINITIONS
    "C10_USING_CUSTOM_GENERATED_MACROS;ET_EVENT_TRACER_ENABLED;ET_USE_THREADPOOL")
endif()
if(TARGET headrace::headrace)
  set(_headrace_behind "")
  foreach(_headrace_file IN LISTS _headrace_files_headrace)
    if(_headrace_file MATCHES "^lib/libexecutorch")
      list(APPEND _headrace_behind "${_headrace_root}/${_headrace_file}")
    endif()
  endforeach()
  set_target_properties(headrace::headrace PROPERTIES
    INTERFACE_LINK_LIBRARIES headrace::caller_stream
    IMPORTED_LINK_DEPENDENT_LIBRARIES "${_headrace_behind}")
endif()
if(TARGET headrace::cuda)
  # Nobody calls it: it registers itself when it is loaded, so a linker that drops what is not called must be told.
  set_target_properties(headrace::cuda PROPERTIES
    INTERFACE_LINK_LIBRARIES headrace::headrace
    IMPORTED_LINK_DEPENDENT_LIBRARIES "${headrace_LIBRARY_DIR}/libheadrace_shims.so"
    INTERFACE_LINK_OPTIONS
      "SHELL:-Xlinker --push-state -Xlinker --no-as-needed -Xlinker \"${headrace_LIBRARY_DIR}/libheadrace_cuda.so\" -Xlinker --pop-state")
endif()
