# Horovod 0.28.1 asks for C++14, torch's headers need C++20: where CMake would say -std=c++14, it now says c++20.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++20")
# From lib/python3.x/site-packages/horovod/torch up to lib, where the venv's libmpi is: so one wheel serves every venv.
set(CMAKE_BUILD_RPATH "\$ORIGIN/../../../..")
# Without debug information; Horovod itself makes -O3 of -O2.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")

# The files that include torch take longest, so they come first: at the end they would leave all cores but one idle. They
# only pass tensors on, and half of their time is optimization.
function(torch_first)
  if(NOT TARGET pytorch)
    return()
  endif()
  get_target_property(sources pytorch SOURCES)
  list(REVERSE sources)
  set_target_properties(pytorch PROPERTIES SOURCES "${sources}")
  list(FILTER sources INCLUDE REGEX "/horovod/torch/")
  set_source_files_properties(${sources} TARGET_DIRECTORY pytorch PROPERTIES COMPILE_OPTIONS "-O1")
endfunction()
cmake_language(DEFER CALL torch_first)
