# Horovod 0.28.1 asks for C++14, torch's headers need C++20: where CMake would say -std=c++14, it now says c++20.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++20")
# From lib/python3.x/site-packages/horovod/torch up to lib, where the venv's libmpi is: so one wheel serves every venv.
set(CMAKE_BUILD_RPATH "\$ORIGIN/../../../..")
