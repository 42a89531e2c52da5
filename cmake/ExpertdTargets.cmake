# Two helpers that give every target of ours the same flags: expertd_library and expertd_test.

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(expertd_flags INTERFACE)
target_include_directories(expertd_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(expertd_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Werror -Wno-missing-field-initializers>)
if(EXPERTD_SANITIZE)
  target_compile_options(expertd_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EXPERTD_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all>)
  target_link_options(expertd_flags INTERFACE -fsanitize=${EXPERTD_SANITIZE})
endif()

# expertd_library(NAME SOURCES a.cc b.cc LINKS x y): one static library of a folder.
function(expertd_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC expertd_flags ${ARG_LINKS})
endfunction()

# Where tests find the tree.
add_library(expertd_test_paths INTERFACE)
target_compile_definitions(expertd_test_paths INTERFACE
  EXPERTD_SOURCE_DIR="${CMAKE_SOURCE_DIR}" EXPERTD_BINARY_DIR="${CMAKE_BINARY_DIR}"
  EXPERTD_TEST_VECTORS="${CMAKE_SOURCE_DIR}/tests/vectors")

# expertd_test(NAME SOURCES a_test.cc LINKS x y [LABELS l] [TIMEOUT s]): every GoogleTest case becomes
# a ctest entry. The golden vectors are found through EXPERTD_TEST_VECTORS.
function(expertd_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINKS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(EXPERTD_SANITIZE)  # several times slower
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  # A third of the compile time of a test's own files at -O3; what they test has its own flags.
  target_compile_options(${name} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>)
  target_link_libraries(${name} PRIVATE expertd_flags expertd_test_paths ${ARG_LINKS} GTest::gmock
    GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST
    PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
