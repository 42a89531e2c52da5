# Run at build time (cmake -D SOURCE_DIR= VERSION= INPUT= OUTPUT= -P): fills INPUT with the version and the
# commit that is being built. OUTPUT is touched only if they changed.
execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --exclude=* --abbrev=12 --dirty
  OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT COMMIT)
  set(COMMIT unknown)
endif()
configure_file(${INPUT} ${OUTPUT} @ONLY)
