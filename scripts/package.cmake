# `cmake --install` and CPack: a tree that may be moved and needs glibc and, for a GPU, a driver.
#   bin/elastickv               finds its libraries relative to itself
#   lib/elastickv/              every library it was linked with, but glibc (component `libraries`)
#   share/doc/elastickv/        README, licence, and the notices of what is bundled
# `cmake --install DIR --component program` leaves the libraries to the system.
set_target_properties(elastickv PROPERTIES INSTALL_RPATH "\$ORIGIN/../lib/elastickv")
# RPATH and not RUNPATH: it also holds for the libraries of libraries, and an LD_LIBRARY_PATH cannot mix in others.
target_link_options(elastickv PRIVATE LINKER:--disable-new-dtags)
install(TARGETS elastickv RUNTIME DESTINATION bin COMPONENT program)
install(FILES README.md LICENSE DESTINATION share/doc/elastickv COMPONENT program)
install(CODE "set(ekv_program \"$<TARGET_FILE:elastickv>\")" COMPONENT libraries)
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/package_libraries.cmake COMPONENT libraries)

set(flavour cpu)
if(CMAKE_CUDA_COMPILER)
  string(REGEX REPLACE "\\..*" "" cuda_major ${CMAKE_CUDA_COMPILER_VERSION})
  set(flavour cuda${cuda_major})
endif()
set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_NAME elastickv)
set(CPACK_PACKAGE_FILE_NAME elastickv-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}-${flavour})
set(CPACK_STRIP_FILES ON)
include(CPack)
