# What was decided, and why, in the last lines that a reader of the configure output sees.
function(mgp_summary_line name enabled why)
  if(enabled)
    message(STATUS "  ${name} yes  (${why})")
  else()
    message(STATUS "  ${name} no   (${why})")
  endif()
endfunction()

get_property(trainers GLOBAL PROPERTY MGP_TRAINERS)
list(JOIN trainers " " trainers)
message(STATUS "Multi-GPU Playground, ${CMAKE_BUILD_TYPE}")
message(STATUS "  LibTorch ${MGP_TORCH_VERSION}  ${MGP_TORCH_ROOT}  (${origin})")
mgp_summary_line("CUDA" ${MGP_WITH_CUDA} "${MGP_CUDA_WHY}")
mgp_summary_line("NCCL" ${MGP_WITH_NCCL} "${MGP_NCCL_WHY}")
mgp_summary_line("MPI " ${MGP_WITH_MPI} "${MGP_MPI_WHY}")
message(STATUS "  Python   ${MGP_TORCH_PYTHON}")
message(STATUS "  Trainers ${trainers}")
if(NOT MGP_WITH_MPI AND NOT MGP_WITH_NCCL)
  message(WARNING "Neither NCCL nor MPI: only single-process trainers will run. sudo apt-get install libopenmpi-dev openmpi-bin")
endif()

# The scripts read from here what this build can do, and with which LibTorch.
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/mgp_build.txt" CONTENT
"MGP_WITH_CUDA=${MGP_WITH_CUDA}
MGP_WITH_NCCL=${MGP_WITH_NCCL}
MGP_WITH_MPI=${MGP_WITH_MPI}
MGP_TORCH_VERSION=${MGP_TORCH_VERSION}
MGP_TORCH_ROOT=${MGP_TORCH_ROOT}
MGP_NCCL_LIBRARY=${NCCL_LIBRARY}
MGP_NCCL_VERSION=${NCCL_VERSION}
MGP_PYTHON=${MGP_TORCH_PYTHON}
MGP_MPIEXEC=${MPIEXEC_EXECUTABLE}
CMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE}
CMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
")
