// The naming schemes of loader/families.

#include <string>

#include "gtest/gtest.h"
#include "loader/families/family.h"

namespace expertd {
namespace {

// Taken apart, a name must say this, and put together again it must be the same.
void ExpectName(const Family& family, const std::string& tensor, const ExpertTensorName& expected) {
  const auto name = family.parse(tensor);
  ASSERT_TRUE(name.has_value()) << tensor;
  EXPECT_EQ(name->prefix, expected.prefix) << tensor;
  EXPECT_EQ(name->mtp, expected.mtp) << tensor;
  EXPECT_EQ(name->layer, expected.layer) << tensor;
  EXPECT_EQ(name->expert, expected.expert) << tensor;
  EXPECT_EQ(name->matrix, expected.matrix) << tensor;
  EXPECT_EQ(name->part, expected.part) << tensor;
  EXPECT_EQ(family.compose(*name), tensor);
}

TEST(FamilyNamesTest, DeepSeekV4) {
  const Family& family = DeepSeekV4Family();
  ExpectName(family, "layers.42.ffn.experts.255.w1.weight",
             {"", false, 42, 255, Matrix::kGate, ExpertPart::kCodes});
  ExpectName(family, "model.layers.0.ffn.experts.0.w3.scale",
             {"model.", false, 0, 0, Matrix::kUp, ExpertPart::kUe8m0Scales});
  ExpectName(family, "mtp.1.ffn.experts.7.w2.weight_scale",
             {"", true, 1, 7, Matrix::kDown, ExpertPart::kE4m3Scales});
  ExpectName(family, "layers.3.ffn.experts.9.w2.weight_scale_2",
             {"", false, 3, 9, Matrix::kDown, ExpertPart::kSecondLevel});
  ExpectName(family, "layers.3.ffn.experts.9.w2.input_scale",
             {"", false, 3, 9, Matrix::kDown, ExpertPart::kInputScale});
}

TEST(FamilyNamesTest, Modelopt) {
  const Family& family = ModeloptFamily();
  ExpectName(family, "model.layers.3.mlp.experts.17.gate_proj.weight",
             {"model.", false, 3, 17, Matrix::kGate, ExpertPart::kCodes});
  ExpectName(family, "model.language_model.layers.3.mlp.experts.17.up_proj.weight_scale",
             {"model.language_model.", false, 3, 17, Matrix::kUp, ExpertPart::kE4m3Scales});
  ExpectName(family, "language_model.model.layers.60.mlp.experts.383.down_proj.weight_scale_2",
             {"language_model.model.", false, 60, 383, Matrix::kDown, ExpertPart::kSecondLevel});
}

TEST(FamilyNamesTest, MiniMax) {
  ExpectName(MiniMaxFamily(), "model.layers.61.block_sparse_moe.experts.255.w1.weight",
             {"model.", false, 61, 255, Matrix::kGate, ExpertPart::kCodes});
  ExpectName(MiniMaxFamily(), "model.layers.61.block_sparse_moe.experts.255.w2.input_scale",
             {"model.", false, 61, 255, Matrix::kDown, ExpertPart::kInputScale});
}

TEST(FamilyNamesTest, OtherModulesBelongToNoFamily) {
  for (const char* tensor :
       {"", "layers.", "layers.0.ffn.shared_experts.w1.weight", "layers.0.ffn.gate.weight",
        "layers.0.ffn.experts.0.w4.weight", "layers.0.ffn.experts.0.w1",
        "layers.0.ffn.experts.0.w1.", "layers.0.ffn.experts.0.w1.weightx",
        "layers.0.ffn.experts.00.w1.weight", "layers.-1.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts.9999999999.w1.weight", "xlayers.0.ffn.experts.0.w1.weight",
        "layers.0.ffn.experts..w1.weight", "model.layers.0.mlp.experts.0.gate_proj.scale",
        "model.layers.0.mlp.experts.0.gate.weight",
        "model.layers.0.mlp.experts.gate_up_proj_blocks", "mtp.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.shared_expert.gate_proj.weight"}) {
    for (const Family* family : ServedFamilies()) {
      EXPECT_FALSE(family->parse(tensor).has_value()) << family->name << ": " << tensor;
    }
  }
}

TEST(FamilyNamesTest, NoTensorBelongsToTwoFamilies) {
  for (const char* tensor :
       {"layers.0.ffn.experts.0.w1.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight"}) {
    int matches = 0;
    for (const Family* family : ServedFamilies()) matches += family->parse(tensor).has_value();
    EXPECT_EQ(matches, 1) << tensor;
  }
}

TEST(FamilyNamesTest, RefusedFamiliesAreKnownByTheirMarks) {
  EXPECT_TRUE(
      CompressedTensorsFamily().matches("model.layers.0.mlp.experts.0.up_proj.weight_packed"));
  EXPECT_FALSE(CompressedTensorsFamily().matches("model.layers.0.self_attn.q_proj.weight_packed"));
  EXPECT_TRUE(GptOssFamily().matches("model.layers.0.mlp.experts.gate_up_proj_blocks"));
  EXPECT_FALSE(GptOssFamily().matches("model.layers.0.mlp.experts.gate_up_proj"));
}

}  // namespace
}  // namespace expertd
