// Runs a fuzz target without a fuzzer: every file of the corpus folder, then some hundred mutations
// of each with a fixed seed, so that the same build sees the same bytes each time. Fails by
// crashing.
//
//   TARGET_replay CORPUS_DIR [--mutations N]

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

// Copies to an exact allocation: a read past the end is seen by AddressSanitizer.
void RunOne(const Bytes& bytes) {
  const Bytes exact(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

// One to four small changes: flip, overwrite, insert, remove, repeat, cut, or a piece of another
// entry.
Bytes Mutate(Bytes bytes, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  static constexpr uint8_t kInteresting[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '"', '\\', '{', '}',
                                             '[',  ']',  ',',  ':',  '-',  '0', '9',  '.', 'e'};
  const auto below = [&](size_t bound) { return bound == 0 ? 0 : random() % bound; };
  for (size_t change = 0, changes = 1 + below(4); change < changes; ++change) {
    const size_t at = below(bytes.size());
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (bytes.empty() ? 2 : below(7)) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        bytes[at] = kInteresting[below(std::size(kInteresting))];
        break;
      case 2:
        bytes.insert(place, kInteresting[below(std::size(kInteresting))]);
        break;
      case 3:
        bytes.erase(place, place + static_cast<std::ptrdiff_t>(
                                       1 + below(std::min<size_t>(8, bytes.size() - at))));
        break;
      case 4: {
        const size_t length = 1 + below(std::min<size_t>(32, bytes.size() - at));
        const Bytes piece(place, place + static_cast<std::ptrdiff_t>(length));
        bytes.insert(place, piece.begin(), piece.end());
        break;
      }
      case 5:
        bytes.resize(at);
        break;
      default: {
        const Bytes& other = corpus[below(corpus.size())];
        const size_t from = below(other.size());
        const size_t length = std::min<size_t>(other.size() - from, 1 + below(64));
        bytes.insert(place, other.begin() + static_cast<std::ptrdiff_t>(from),
                     other.begin() + static_cast<std::ptrdiff_t>(from + length));
      }
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && !(argc == 4 && std::strcmp(argv[2], "--mutations") == 0)) {
    std::fprintf(stderr, "usage: %s CORPUS_DIR [--mutations N]\n", argv[0]);
    return 2;
  }
  const int mutations = argc == 4 ? std::atoi(argv[3]) : 300;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());  // the folder's order is nobody's promise
  std::vector<Bytes> corpus;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: found no corpus, expected files\n", argv[1]);
    return 1;
  }
  RunOne({});
  for (const Bytes& bytes : corpus) RunOne(bytes);
  std::mt19937_64 random(20251129);
  for (const Bytes& bytes : corpus) {
    for (int i = 0; i < mutations; ++i) RunOne(Mutate(bytes, corpus, random));
  }
  std::printf("%zu files, %d mutations of each\n", corpus.size(), mutations);
  return 0;
}
