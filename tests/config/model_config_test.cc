#include "config/model_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Config(const std::string& more = "") {
  return absl::StrCat(
      R"({"hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,)"
      R"( "num_experts_per_tok": 6, "num_hidden_layers": 4)",
      more, "}");
}

std::string Replaced(const std::string& from, const std::string& to) {
  std::string text = Config();
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string Refusal(const std::string& config, const std::string& quant = "") {
  const auto model = ParseModelConfig(config, quant);
  EXPECT_FALSE(model.ok()) << config;
  return std::string(model.status().message());
}

ModelConfig Parsed(const std::string& config, const std::string& quant = "") {
  auto model = ParseModelConfig(config, quant);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? *std::move(model) : ModelConfig();
}

TEST(ModelConfigTest, DeepSeekKeysAreRead) {
  const ModelConfig model = Parsed(Config(
      R"(, "model_type": "deepseek_v4", "swiglu_limit": 10.0, "expert_dtype": "fp4",
         "num_nextn_predict_layers": 1, "hidden_act": "silu",
         "quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"})"));
  EXPECT_EQ(model.model_type, "deepseek_v4");
  EXPECT_EQ(model.hidden_size, 4096);
  EXPECT_EQ(model.intermediate_size, 2048);
  EXPECT_EQ(model.num_experts, 256);
  EXPECT_EQ(model.top_k, 6);
  EXPECT_EQ(model.num_hidden_layers, 4);
  EXPECT_EQ(model.num_mtp_layers, 1);
  EXPECT_EQ(model.swiglu_limit, 10.0f);
  EXPECT_EQ(model.expert_dtype, "fp4");
  EXPECT_EQ(model.quant_method, "fp8");
  EXPECT_EQ(model.quant_format, "NVFP4");
  EXPECT_EQ(model.is_moe, std::vector<bool>(4, true));
}

TEST(ModelConfigTest, OtherSpellingsOfTheExpertCountAreRead) {
  EXPECT_EQ(Parsed(Replaced("n_routed_experts", "num_experts")).num_experts, 256);
  const ModelConfig local = Parsed(
      R"({"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128,
          "experts_per_token": 4, "num_hidden_layers": 36})");
  EXPECT_EQ(local.num_experts, 128);
  EXPECT_EQ(local.top_k, 4);
  EXPECT_EQ(local.intermediate_size, 2880);
}

TEST(ModelConfigTest, SizeOfDenseLayersIsNotTakenForTheExperts) {
  EXPECT_THAT(Refusal(Replaced("moe_intermediate_size", "intermediate_size")),
              HasSubstr("moe_intermediate_size: missing, expected a whole number"));
}

TEST(ModelConfigTest, NestedTextConfigIsRead) {
  const ModelConfig model =
      Parsed(absl::StrCat(R"({"vision_config": {}, "quantization_config": {"quant_algo": "NVFP4"},
                      "text_config": )",
                          Config(), "}"));
  EXPECT_EQ(model.hidden_size, 4096);
  EXPECT_EQ(model.quant_format, "NVFP4");
}

TEST(ModelConfigTest, QuantFileFillsWhatTheConfigLeavesOut) {
  const ModelConfig model =
      Parsed(Config(), R"({"producer": {}, "quantization": {"quant_algo": "NVFP4"}})");
  EXPECT_EQ(model.quant_method, "modelopt");
  EXPECT_EQ(model.quant_format, "NVFP4");
}

TEST(ModelConfigTest, AWrongQuantFileIsNamedByItsOwnName) {
  EXPECT_EQ(Refusal(Config(), "[]"),
            "hf_quant_config.json: found a JSON array, expected one JSON object");
  EXPECT_EQ(Refusal(Config(), "{}"),
            "hf_quant_config.json: quantization: missing, expected an object");
  EXPECT_EQ(Refusal(Config(), R"({"quantization": 4})"),
            "hf_quant_config.json: quantization: found 4, expected an object");
  EXPECT_EQ(Refusal(Config(), R"({"quantization": {"quant_algo": 4}})"),
            "hf_quant_config.json: quant_algo: found 4, expected a string");
}

TEST(ModelConfigTest, EveryMissingKeyIsNamedAtOnce) {
  const std::string message = Refusal("{}");
  for (const char* key : {"hidden_size", "moe_intermediate_size", "n_routed_experts",
                          "num_experts_per_tok", "num_hidden_layers"}) {
    EXPECT_THAT(message, HasSubstr(key));
  }
  EXPECT_THAT(message, HasSubstr("missing, expected a whole number from 1 to"));
}

TEST(ModelConfigTest, WrongTypesNameFieldFoundAndExpected) {
  EXPECT_THAT(Refusal(Replaced("4096", "\"4096\"")),
              HasSubstr("hidden_size: found \"4096\", expected a whole number from 1 to 32768"));
  EXPECT_THAT(Refusal(Replaced("4096", "4096.5")),
              HasSubstr("hidden_size: found 4096.5, expected"));
  EXPECT_THAT(Refusal(Replaced("4096", "[4096]")), HasSubstr("hidden_size: found an array of 1"));
  EXPECT_THAT(Refusal(Replaced("4096", "true")), HasSubstr("hidden_size: found true, expected"));
  EXPECT_THAT(Refusal(Config(R"(, "expert_dtype": 4)")),
              HasSubstr("expert_dtype: found 4, expected a string"));
  EXPECT_THAT(Refusal(Config(R"(, "quantization_config": "x")")),
              HasSubstr("quantization_config: found \"x\", expected an object"));
}

TEST(ModelConfigTest, AbsurdNumbersAreRefusedBeforeAnythingIsSizedByThem) {
  EXPECT_THAT(Refusal(Replaced("4096", "-4096")), HasSubstr("hidden_size: found -4096, expected"));
  EXPECT_THAT(Refusal(Replaced("4096", "0")), HasSubstr("hidden_size: found 0, expected"));
  EXPECT_THAT(Refusal(Replaced("4096", "4294967296")), HasSubstr("hidden_size: found 4294967296"));
  EXPECT_THAT(Refusal(Replaced("4096", "18446744073709551615")),
              HasSubstr("hidden_size: found 18446744073709551615"));
  EXPECT_THAT(Refusal(Replaced("4096", "1e99")), HasSubstr("hidden_size: found 1e+99"));
  EXPECT_THAT(Refusal(Replaced("256", "1000000")), HasSubstr("n_routed_experts: found 1000000"));
  EXPECT_THAT(Refusal(Replaced("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 100000")),
              HasSubstr("num_hidden_layers: found 100000, expected a whole number from 1 to 1024"));
}

TEST(ModelConfigTest, OneWrongKeyIsOneProblem) {
  EXPECT_EQ(Refusal(Replaced("4096", "0")),
            "config.json: hidden_size: found 0, expected a whole number from 1 to 32768");
  EXPECT_EQ(Refusal(Replaced("\"num_hidden_layers\": 4",
                             "\"num_hidden_layers\": 0, \"mlp_layer_types\": [\"dense\"]")),
            "config.json: num_hidden_layers: found 0, expected a whole number from 1 to 1024");
  EXPECT_EQ(Refusal(Config(R"(, "hidden_act": "gelu")")),
            "config.json: hidden_act: found \"gelu\", expected silu");
}

TEST(ModelConfigTest, GeometryThatCutsABlockIsRefused) {
  EXPECT_THAT(Refusal(Replaced("4096", "4095")),
              HasSubstr("hidden_size: found 4095, expected a multiple of 32"));
}

TEST(ModelConfigTest, TopKAboveTheExpertCountIsRefused) {
  EXPECT_THAT(Refusal(Replaced("256", "4")),
              HasSubstr("num_experts_per_tok: found 6, expected at most n_routed_experts = 4"));
}

TEST(ModelConfigTest, TwoExpertCountsThatDisagreeAreRefused) {
  EXPECT_THAT(Refusal(Config(R"(, "num_experts": 128)")),
              HasSubstr("num_experts: found 128, expected 256 as in n_routed_experts"));
}

TEST(ModelConfigTest, ClampMustBeAFiniteNumberOrAbsent) {
  EXPECT_EQ(Parsed(Config(R"(, "swiglu_limit": null)")).swiglu_limit, 0);
  EXPECT_EQ(Parsed(Config(R"(, "swiglu_limit": 7)")).swiglu_limit, 7.0f);
  EXPECT_THAT(Refusal(Config(R"(, "swiglu_limit": -1)")),
              HasSubstr("swiglu_limit: found -1, expected a finite number >= 0"));
  EXPECT_THAT(Refusal(Config(R"(, "swiglu_limit": 1e300)")),
              HasSubstr("swiglu_limit: found 1e+300"));
  EXPECT_THAT(Refusal(Config(R"(, "swiglu_limit": "10")")),
              HasSubstr("swiglu_limit: found \"10\""));
}

TEST(ModelConfigTest, DenseLayersAreKnownFromEveryKey) {
  const auto is_moe = [](const std::string& more) { return Parsed(Config(more)).is_moe; };
  EXPECT_EQ(is_moe(R"(, "first_k_dense_replace": 3)"),
            (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(is_moe(R"(, "decoder_sparse_step": 2)"), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(is_moe(R"(, "mlp_only_layers": [1, 2, 99])"),
            (std::vector<bool>{true, false, false, true}));
  EXPECT_EQ(is_moe(R"(, "moe_layer_freq": 2)"), (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(is_moe(R"(, "moe_layer_freq": [0, 1, 1, 0])"),
            (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(is_moe(R"(, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"])"),
            (std::vector<bool>{false, true, true, true}));
  EXPECT_THAT(Refusal(Config(R"(, "mlp_only_layers": 1)")), HasSubstr("mlp_only_layers: found 1"));
  EXPECT_THAT(Refusal(Config(R"(, "moe_layer_freq": [1])")), HasSubstr("moe_layer_freq: found an"));
  EXPECT_THAT(Refusal(Config(R"(, "moe_layer_freq": 0)")), HasSubstr("moe_layer_freq: found 0"));
  EXPECT_THAT(Refusal(Config(R"(, "mlp_layer_types": [])")),
              HasSubstr("mlp_layer_types: found an"));
}

TEST(ModelConfigTest, TextThatIsNotOneObjectIsRefused) {
  for (const std::string& text :
       {std::string(), std::string("[]"), std::string("7"), Config().substr(0, 40), Config() + "x",
        std::string("{\"a\xff\": 1}"), Config() + std::string("\0x", 2)}) {
    EXPECT_THAT(Refusal(text),
                AllOf(HasSubstr("config.json: found"), HasSubstr("expected one JSON object")));
  }
  EXPECT_THAT(Refusal(std::string(100000, '[')), HasSubstr("more than 16 levels"));
  EXPECT_THAT(Refusal("{\"a\":" + std::string(1000, '[') + std::string(1000, ']') + "}"),
              HasSubstr("more than 16 levels"));
}

}  // namespace
}  // namespace expertd
