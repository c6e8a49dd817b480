// Peak rates of GPUs, for MFU. Dense numbers: where a data sheet prints only "with sparsity", half of it.
#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/device.hpp"

namespace mgp {
namespace {

struct Peak {
  std::string_view words;               ///< words that the device's name must contain
  double fp64, fp32, tf32, bf16, fp16;  ///< TFLOP/s; 0: the device has no such arithmetic, or the sheet does not say
};

// fp64 is the tensor-core rate where there is one, because cuBLAS uses it. bf16 and fp16 are with fp32 accumulation.
// The first row that fits wins, so that a variant stands before the plain name.
constexpr std::array<Peak, 25> kPeaks = {{
    // NVIDIA Tesla V100 data sheet (January 2020)
    {"v100s", 8.2, 16.4, 0, 0, 130},
    {"v100 pcie", 7, 14, 0, 0, 112},
    {"v100", 7.8, 15.7, 0, 0, 125},
    // NVIDIA T4 data sheet
    {"t4", 0, 8.1, 0, 0, 65},
    // NVIDIA A100 data sheet (June 2021), all forms alike; A30, A40, A10 data sheets
    {"a100", 19.5, 19.5, 156, 312, 312},
    {"a30", 10.3, 10.3, 82, 165, 165},
    {"a40", 0, 37.4, 74.8, 149.7, 149.7},
    {"a10", 0, 31.2, 62.5, 125, 125},
    // NVIDIA RTX A6000 data sheet: 309.7 with sparsity
    {"rtx a6000", 0, 38.7, 77.4, 154.8, 154.8},
    // NVIDIA L4, L40 and L40S data sheets: dense values beside those with sparsity
    {"l4", 0, 30.3, 60, 121, 121},
    {"l40", 0, 90.5, 90.5, 181, 181},
    {"l40s", 0, 91.6, 183, 362, 362},
    // NVIDIA Ampere GA102 white paper, appendix A
    {"rtx 3080", 0, 29.8, 29.8, 59.5, 59.5},
    {"rtx 3090", 0.556, 35.6, 35.6, 71, 71},
    // NVIDIA Ada GPU architecture white paper, appendix A
    {"rtx 4080", 0, 48.7, 48.7, 97.5, 97.5},
    {"rtx 4090", 1.29, 82.6, 82.6, 165.2, 165.2},
    // NVIDIA RTX Blackwell GPU architecture white paper, appendix A
    {"rtx 5090", 1.64, 104.8, 104.8, 209.5, 209.5},
    // NVIDIA H100 data sheet: PCIe 756 and NVL 835 dense bf16, SXM 989
    {"h100 pcie", 51, 51, 378, 756, 756},
    {"h100 nvl", 60, 60, 417.5, 835, 835},
    {"h100", 67, 67, 494.5, 989, 989},
    // NVIDIA H200 data sheet
    {"h200 nvl", 60, 60, 417.5, 835, 835},
    {"h200", 67, 67, 494.5, 989, 989},
    // NVIDIA GH200 Grace Hopper data sheet
    {"gh200", 67, 67, 494.5, 989, 989},
    // NVIDIA HGX B200 data sheet, an eighth of the board; NVIDIA GB200 NVL72 data sheet, a 72nd of the rack
    {"b200", 37, 75, 1125, 2250, 2250},
    {"gb200", 40, 80, 1250, 2500, 2500},
}};

std::vector<std::string> words_of(std::string_view text) {
  std::string spaced;
  for (const char c : text) {
    const auto letter = static_cast<unsigned char>(c);
    spaced += std::isalnum(letter) ? static_cast<char>(std::tolower(letter)) : ' ';
  }
  std::vector<std::string> words;
  std::istringstream stream(spaced);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

double peak_tflops(const std::string& device_name, const std::string& precision) {
  const std::vector<std::string> name = words_of(device_name);
  const auto has = [&](std::string_view word) { return std::find(name.begin(), name.end(), word) != name.end(); };
  // Slices and slower namesakes of a device: no number is better than a wrong one.
  for (const char* variant : {"mig", "laptop", "mobile", "super", "ti", "d", "max"}) {
    if (has(variant)) return 0;
  }
  for (const Peak& peak : kPeaks) {
    const std::vector<std::string> wanted = words_of(peak.words);
    if (!std::all_of(wanted.begin(), wanted.end(), has)) continue;
    if (precision == "fp64") return peak.fp64;
    if (precision == "fp32") return peak.fp32;
    if (precision == "tf32") return peak.tf32;
    if (precision == "bf16") return peak.bf16;
    if (precision == "fp16") return peak.fp16;
    return 0;
  }
  return 0;
}

}  // namespace mgp
