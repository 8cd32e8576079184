# `cmake --install` and `cpack`: bin/elastickv with the libraries that it needs beside it in lib/elastickv, so that the folder
# runs wherever it lies, on a machine that has glibc and, for CUDA, a driver. scripts/check_package.py proves it.
#
# Bundled and not linked statically: Debian has cpp-httplib and prometheus-cpp as shared libraries only. RPATH and
# not RUNPATH, because the libraries among them need each other. libstdc++ and libgcc come along: the machine may have none,
# or older ones. -DEKV_BUNDLE_LIBRARIES=OFF installs the program and documents alone, for packages of a distribution.
include(GNUInstallDirs)
if(CMAKE_CUDA_COMPILER)
  find_package(CUDAToolkit REQUIRED)
endif()
set(EKV_LIBRARY_FOLDER ${CMAKE_INSTALL_LIBDIR}/elastickv)
if(CMAKE_INSTALL_LIBDIR MATCHES "/")  # lib/x86_64-linux-gnu: only a distribution's own packages go there
  set(EKV_LIBRARY_FOLDER lib/elastickv)
endif()

install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR}
        COMPONENT program)
if(EKV_BUNDLE_LIBRARIES)
  set_target_properties(elastickv PROPERTIES INSTALL_RPATH "\$ORIGIN/../${EKV_LIBRARY_FOLDER}")
  target_link_options(elastickv PRIVATE -Wl,--disable-new-dtags)
  install(TARGETS elastickv RUNTIME_DEPENDENCY_SET elastickv_libraries
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
  # glibc is the system's; the driver comes with the GPU; cuBLASLt is half a gigabyte and a component of its own.
  install(RUNTIME_DEPENDENCY_SET elastickv_libraries
          PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv)\\.so" "^libcuda\\.so" "^libcublasLt\\.so"
          LIBRARY DESTINATION ${EKV_LIBRARY_FOLDER} COMPONENT program)
  if(TARGET CUDA::cublasLt)
    install(CODE "file(INSTALL DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${EKV_LIBRARY_FOLDER}\" TYPE SHARED_LIBRARY
      FOLLOW_SYMLINK_CHAIN FILES \"${CUDA_cublasLt_LIBRARY}\")" COMPONENT cublas)
  endif()
  # The terms of what is inside, as Debian keeps them.
  foreach(package libcpp-httplib-dev libfmt-dev libspdlog-dev libpcre2-dev libutf8proc-dev prometheus-cpp-dev libssl3 zlib1g
          libbrotli1 libstdc++6 nlohmann-json3-dev libcli11-dev libxxhash-dev)
    install(FILES /usr/share/doc/${package}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR}/licenses RENAME ${package}.txt
            COMPONENT program OPTIONAL)
  endforeach()
else()
  install(TARGETS elastickv RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()

set(CPACK_GENERATOR TGZ)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_VENDOR elastickv)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Serves large language models over an OpenAI-compatible API")
set(CPACK_PACKAGE_FILE_NAME elastickv-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
if(TARGET CUDA::cublasLt)
  string(APPEND CPACK_PACKAGE_FILE_NAME -cuda${CUDAToolkit_VERSION_MAJOR})
endif()
set(CPACK_VERBATIM_VARIABLES ON)
include(CPack)
