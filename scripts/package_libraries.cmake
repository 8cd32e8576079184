# Runs at install time: copies the libraries of `ekv_program` but those whose names match `ekv_left_out`, and a notice
# for each package whose code is in the tree.
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES "${ekv_program}" RESOLVED_DEPENDENCIES_VAR libraries
     # glibc and its loader belong to the machine, as does everything of the driver.
     PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv)\\.so" "^libcuda\\.so" "^libnvidia-"
                          ${ekv_left_out})
file(INSTALL ${libraries} DESTINATION "${CMAKE_INSTALL_PREFIX}/lib/elastickv" TYPE SHARED_LIBRARY FOLLOW_SYMLINK_CHAIN)

function(install_notice name file)
  file(REAL_PATH "${file}" real)
  file(INSTALL "${real}" DESTINATION "${CMAKE_INSTALL_PREFIX}/share/doc/elastickv/notices" TYPE FILE RENAME "${name}")
endfunction()

set(without "")
# Headers whose code is in the program itself.
set(packages nlohmann-json3-dev libcli11-dev libxxhash-dev)
foreach(library ${libraries})
  get_filename_component(name "${library}" NAME)
  execute_process(COMMAND dpkg-query --search "*/${name}" OUTPUT_VARIABLE owners ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND owners MATCHES "^([^:]+):")
    list(APPEND packages "${CMAKE_MATCH_1}")
  else()
    # Not of a Debian package: a CUDA toolkit from its own installer has the licence at its top, one from wheels beside.
    file(REAL_PATH "${library}" real)
    get_filename_component(folder "${real}" DIRECTORY)
    file(GLOB licences "${folder}/../EULA.txt" "${folder}/../../EULA.txt" "${folder}/../../../EULA.txt"
         "${folder}/../dist-info/nvidia_cublas-*/licenses/*")
    if(licences)
      list(GET licences 0 licence)
      install_notice("${name}" "${licence}")
    else()
      list(APPEND without "${name}")
    endif()
  endif()
endforeach()
list(REMOVE_DUPLICATES packages)
foreach(package ${packages})
  if(EXISTS "/usr/share/doc/${package}/copyright")
    install_notice("${package}" "/usr/share/doc/${package}/copyright")
  else()
    list(APPEND without "${package}")
  endif()
endforeach()
if(without)
  list(JOIN without ", " without)
  message(WARNING "no licence text on this machine for ${without}: add it to share/doc/elastickv/notices before you give the "
                  "package to others")
endif()
