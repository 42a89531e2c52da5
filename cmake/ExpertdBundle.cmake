# expertd_bundle(TARGET): the install component `bundle`, a folder that runs on a machine with nothing but
# glibc: the binary, and beside it lib/ with every shared library it loads.
#   cmake --install build/cpu-release --component bundle --prefix DIR
function(expertd_bundle target)
  # DT_RPATH and not DT_RUNPATH: it also holds for what the libraries load themselves.
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN/lib" BUILD_RPATH "$ORIGIN/lib")
  install(TARGETS ${target} RUNTIME_DEPENDENCY_SET expertd_libraries
    RUNTIME DESTINATION . COMPONENT bundle)
  # glibc and the driver's libcuda belong to the machine.
  install(RUNTIME_DEPENDENCY_SET expertd_libraries
    PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util|anl|nss_[a-z]+)\\.so" "^libcuda\\.so"
    LIBRARY DESTINATION lib COMPONENT bundle)
endfunction()
