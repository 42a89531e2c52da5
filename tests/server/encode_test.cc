#include "server/encode.h"

#include <cstring>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/formats.h"

namespace expertd {
namespace {

const absl::Time kReceived = absl::Now() - absl::Milliseconds(5);

// Two rows of H 2 that lie apart, as after a spread over two ranks.
template <typename T>
v1::ForwardResponse Encode(const std::vector<T>& first, const std::vector<T>& second, DType dtype,
                           bool as_numbers) {
  RequestView view;
  view.key.output_dtype = dtype;
  view.num_tokens = 2;
  view.hidden_size = 2;
  view.as_numbers = as_numbers;
  Answer answer;
  answer.rows = {{first.data(), 1}, {second.data(), 1}};
  answer.timing = {1, 2, 3, 4, 5, 6};
  v1::ForwardResponse response;
  EncodeAnswer(answer, view, 9, kReceived, kReceived + absl::Microseconds(70), &response);
  return response;
}

TEST(Encode, F32RowsBecomeBytesInOrder) {
  const auto response = Encode<float>({1, 2}, {3, 4}, DType::kF32, false);
  ASSERT_EQ(response.output().size(), 16u);
  float values[4];
  std::memcpy(values, response.output().data(), 16);
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[3], 4);
  EXPECT_EQ(response.output_values_size(), 0);
  EXPECT_EQ(response.output_dtype(), v1::DTYPE_F32);
  EXPECT_EQ(response.request_id(), 9u);
  EXPECT_EQ(response.num_tokens(), 2);
  EXPECT_EQ(response.hidden_size(), 2);
}

TEST(Encode, Bf16RowsBecomeNumbersIfTheRequestWasInNumbers) {
  const uint16_t one = FloatToBf16(1.5f);
  const auto response = Encode<uint16_t>({one, one}, {one, FloatToBf16(-2)}, DType::kBf16, true);
  ASSERT_EQ(response.output_values_size(), 4);
  EXPECT_EQ(response.output_values(0), 1.5f);
  EXPECT_EQ(response.output_values(3), -2.0f);
  EXPECT_TRUE(response.output().empty());
}

TEST(Encode, F32NumbersAreTheSameBits) {
  const auto response = Encode<float>({0.1f, 0.2f}, {0.3f, 0.4f}, DType::kF32, true);
  ASSERT_EQ(response.output_values_size(), 4);
  EXPECT_EQ(response.output_values(2), 0.3f);
}

TEST(Encode, TheTimingBlockIsFilled) {
  const v1::Timing timing = Encode<float>({1, 2}, {3, 4}, DType::kF32, false).timing();
  EXPECT_EQ(timing.receive_us(), 70u);
  EXPECT_EQ(timing.queue_us(), 1u);
  EXPECT_EQ(timing.copy_in_us(), 2u);
  EXPECT_EQ(timing.kernel_us(), 3u);
  EXPECT_GE(timing.copy_out_us(), 4u);
  EXPECT_EQ(timing.step(), 5u);
  EXPECT_EQ(timing.step_tokens(), 6);
  EXPECT_GE(timing.total_us(), 5000u);
}

}  // namespace
}  // namespace expertd
