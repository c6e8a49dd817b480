# The trainers and the small libraries beside them.

# All targets share the precompiled header of mgp_common.
function(mgp_use_precompiled_header target)
  target_precompile_headers(${target} REUSE_FROM mgp_common)
endfunction()

# examples/<folder>/*.cpp without train_*.cpp → library mgp_<folder>.
function(mgp_add_example_library folder)
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/${folder}/*.cpp")
  list(FILTER sources EXCLUDE REGEX "/train_[^/]*\\.cpp$")
  if(sources)
    add_library(mgp_${folder} STATIC ${sources})
    target_link_libraries(mgp_${folder} PUBLIC mgp_common)
    mgp_use_precompiled_header(mgp_${folder})
  endif()
endfunction()

# The libraries that a trainer of this folder links: its own, those it builds on, and the one-device reference of
# examples/single that --verify compares with.
function(mgp_libraries_of result folder)
  set(libraries "")
  foreach(name ${folder} ${MGP_USES_${folder}} single)
    if(TARGET mgp_${name})
      list(APPEND libraries mgp_${name})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES libraries)
  set(${result} ${libraries} mgp_common PARENT_SCOPE)
endfunction()

# examples/<folder>/train_*.cpp → one executable each.
function(mgp_add_trainers folder)
  file(GLOB mains CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/examples/${folder}/train_*.cpp")
  foreach(main IN LISTS mains)
    get_filename_component(name "${main}" NAME_WE)
    add_executable(${name} "${main}")
    mgp_libraries_of(libraries ${folder})
    target_link_libraries(${name} PRIVATE ${libraries})
    mgp_use_precompiled_header(${name})
    set_target_properties(${name} PROPERTIES MGP_FOLDER ${folder} MGP_MAIN "examples/${folder}/${name}.cpp")
    set_property(GLOBAL APPEND PROPERTY MGP_TRAINERS ${name})
  endforeach()
endfunction()
