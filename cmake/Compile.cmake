# Flags of our own code. They are global on purpose: a precompiled header can only be shared by targets whose flags,
# definitions and include folders are all the same.

add_compile_options(-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wunused -Wformat=2)
if(MGP_WERROR)
  # These look through inlined library code and cry wolf there; they stay warnings.
  add_compile_options(-Werror -Wno-error=maybe-uninitialized -Wno-error=array-bounds -Wno-error=stringop-overflow
                      -Wno-error=stringop-overread -Wno-error=restrict -Wno-error=free-nonheap-object
                      -Wno-error=deprecated-declarations -Wno-error=invalid-pch)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    add_compile_options(-Wno-error=dangling-reference)
  endif()
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options(-fdiagnostics-color=auto)
endif()

# -O2 rather than -O3: the work is done inside LibTorch, and our own code compiles faster.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

# ccache needs to be told that a precompiled header is fine; cmake/ccache.sh does. It also makes clones share results.
if(MGP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(MGP_CCACHE_PROGRAM ccache)
  mark_as_advanced(MGP_CCACHE_PROGRAM)
  if(MGP_CCACHE_PROGRAM)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/cmake/ccache.sh")
    add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>)
  endif()
endif()

# LibTorch and MPI are not built with sanitizers, which gives false alarms; the defaults that silence them are compiled
# in, so that a program needs no environment variables. See the presets asan and tsan.
if("${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_DEBUG}" MATCHES "-fsanitize=")
  add_library(mgp_sanitizer_defaults OBJECT "${PROJECT_SOURCE_DIR}/cmake/sanitizer_defaults.cpp")
  link_libraries($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:$<TARGET_OBJECTS:mgp_sanitizer_defaults>>)
endif()
