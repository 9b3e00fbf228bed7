# A toolchain file is the one CMake file that a build can be given from outside, but it is read before the compiler's
# own settings, which would overwrite those of horovod.cmake; so that file is read with the project, after them.
set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/horovod.cmake")
