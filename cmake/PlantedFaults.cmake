# Trainers with a planted fault, to prove that --verify finds it (and for readers to practise diagnosis).
#
# Each tests/planted/<fault>.patch is a unified diff against files of examples/ (or a .cpp of common/), paths written
# a/examples/... and b/examples/.... Before the diff it says in plain words what is wrong, and "Target: train_ddp" names
# the trainer. Here it becomes build/bin/planted/<fault>, the same trainer with the patched files in place of the
# originals. The target planted_faults builds them all; nothing else does.

add_custom_target(planted_faults)

function(mgp_add_planted_fault patch)
  get_filename_component(fault "${patch}" NAME_WE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${patch}")   # the file list is read from it

  file(STRINGS "${patch}" trainer REGEX "^Target: *[A-Za-z0-9_]+" LIMIT_COUNT 1)
  string(REGEX REPLACE "^Target: *([A-Za-z0-9_]+).*" "\\1" trainer "${trainer}")
  if(NOT trainer)
    message(FATAL_ERROR "${patch} has no line \"Target: <trainer>\".")
  endif()
  if(NOT TARGET ${trainer})
    message(STATUS "planted fault ${fault} left out: its trainer ${trainer} is not in this tree")
    return()
  endif()
  get_target_property(folder ${trainer} MGP_FOLDER)
  get_target_property(main ${trainer} MGP_MAIN)

  file(STRINGS "${patch}" lines REGEX "^\\+\\+\\+ b/")
  set(touched "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^\\+\\+\\+ b/([^ \t]+).*" "\\1" file "${line}")
    if(NOT EXISTS "${PROJECT_SOURCE_DIR}/${file}")
      message(FATAL_ERROR "${patch} changes ${file}, which does not exist.")
    endif()
    if(file MATCHES "^common/.*\\.hpp$" OR NOT file MATCHES "^(examples|common)/")
      message(FATAL_ERROR "${patch} changes ${file}: only files of examples/ and sources of common/ can be patched.")
    endif()
    list(APPEND touched "${file}")
  endforeach()

  # What to compile anew: the patched sources; with a patched header, all sources of its folder and of the trainer's
  # folder. The rest is linked from the ordinary libraries. The linker takes no archive member whose symbols it already
  # has, so a patched file takes the place of the original.
  set(units "")
  foreach(file IN LISTS touched)
    if(file MATCHES "\\.cpp$")
      list(APPEND units "${file}")
    else()
      get_filename_component(header_folder "${file}" DIRECTORY)
      file(GLOB siblings RELATIVE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/${header_folder}/*.cpp"
                                                          "${PROJECT_SOURCE_DIR}/examples/${folder}/*.cpp")
      list(FILTER siblings EXCLUDE REGEX "/train_[^/]*\\.cpp$")
      list(APPEND units ${siblings} "${main}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES units)

  set(copies_folder "${PROJECT_BINARY_DIR}/planted/${fault}")
  set(originals "")
  set(copies "")
  set(copy_commands "")
  foreach(file IN LISTS touched)
    list(APPEND originals "${PROJECT_SOURCE_DIR}/${file}")
    list(APPEND copies "${copies_folder}/${file}")
    list(APPEND copy_commands COMMAND ${CMAKE_COMMAND} -E copy "${PROJECT_SOURCE_DIR}/${file}" "${copies_folder}/${file}")
  endforeach()
  add_custom_command(
    OUTPUT ${copies}
    COMMAND ${CMAKE_COMMAND} -E rm -rf "${copies_folder}"
    ${copy_commands}
    COMMAND patch --quiet --batch --forward --no-backup-if-mismatch -p1 -d "${copies_folder}" -i "${patch}"
    DEPENDS ${originals} "${patch}"
    COMMENT "Planting ${fault}"
    VERBATIM)

  set(sources "")
  foreach(file IN LISTS units)
    if(file IN_LIST touched)
      list(APPEND sources "${copies_folder}/${file}")
    else()
      list(APPEND sources "${PROJECT_SOURCE_DIR}/${file}")
    endif()
  endforeach()
  if(NOT main IN_LIST units)
    list(APPEND sources $<TARGET_OBJECTS:${trainer}>)   # main did not change: its object file is taken as it is
  endif()

  set(target planted_${fault})
  add_executable(${target} EXCLUDE_FROM_ALL ${sources} ${copies})
  # Patched headers win over the originals because includes are written from the root: "examples/ddp/x.hpp".
  target_include_directories(${target} BEFORE PRIVATE "${copies_folder}")
  mgp_libraries_of(libraries ${folder})
  target_link_libraries(${target} PRIVATE ${libraries})
  mgp_use_precompiled_header(${target})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME ${fault} RUNTIME_OUTPUT_DIRECTORY "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/planted")
  add_dependencies(planted_faults ${target})
endfunction()

file(GLOB patches CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/planted/*.patch")
if(patches)
  find_program(MGP_PATCH patch)
  if(NOT MGP_PATCH)
    message(FATAL_ERROR "The program patch was not found: sudo apt-get install patch (or -DMGP_TESTS=OFF)")
  endif()
endif()
foreach(patch IN LISTS patches)
  mgp_add_planted_fault("${patch}")
endforeach()
