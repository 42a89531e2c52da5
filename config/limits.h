#pragma once

#include <cstdint>

// Every bound of the daemon, each with its unit and reason. Nothing else in the tree may invent
// one.
namespace expertd::limits {

// --- model geometry (absurd numbers in config.json are refused before anything is sized from them)
inline constexpr int64_t kMaxHiddenSize = 32768;  // largest published H is 7168
inline constexpr int64_t kMaxIntermediateSize =
    32768;  // largest published I is 3072 (dense ones are not ours)
inline constexpr int64_t kGeometryMultiple = 32;      // H and I: one MXFP4 block
inline constexpr int64_t kCudaGeometryMultiple = 64;  // a row tile of the CUDA kernels
inline constexpr int32_t kMaxExperts = 4096;          // largest published E is 896
inline constexpr int32_t kMaxTopK = 32;               // largest published K is 16
inline constexpr int32_t kMaxLayers = 1024;           // largest published count is 94
inline constexpr int32_t kMaxRanks = 256;

// --- files
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;  // the format's own limit
inline constexpr uint64_t kMaxJsonConfigBytes = 16u << 20;   // config.json, hf_quant_config.json
inline constexpr uint64_t kMaxShardIndexBytes = 256u << 20;  // E 896 x 61 layers NVFP4 needs 70 MB
inline constexpr int32_t kMaxShards = 10'000;
inline constexpr uint64_t kMaxTensorRank = 32;  // dimensions; expert tensors have 2

// --- requests and steps
inline constexpr int32_t kDefaultMaxTokensPerRank =
    1024;  // rows a rank takes a step; sizes the workspace
inline constexpr int32_t kMaxTokensPerRank = 65536;
inline constexpr int32_t kStepsInFlight = 2;         // one running, one staged (protocol of steps)
inline constexpr int32_t kStepMemories = 3;          // the two in flight and one being answered
inline constexpr int32_t kMaxQueuedRequests = 4096;  // all layers of a process together
inline constexpr int64_t kMaxInflightBytes = 1ll << 30;  // request bytes held by a process
inline constexpr int32_t kMaxStreamInflight = 64;        // requests of one ForwardStream
inline constexpr int32_t kMaxConcurrentStreams =
    256;  // HTTP/2 streams of one connection; each may hold a message that is not decoded yet
inline constexpr int64_t kTransportBytes = 64ll << 20;        // connections, beside the messages
inline constexpr int64_t kMaxMessageBytes = (2ll << 30) - 1;  // protobuf's own limit
inline constexpr int32_t kKeptAllocationBytes =
    32 << 20;  // glibc's largest threshold for staying off mmap
inline constexpr int32_t kKeptHeapBytes = 1 << 30;  // free memory at the heap's end that is kept
inline constexpr int32_t kHttp2FrameBytes = (16 << 20) - 1;  // the largest: fewer, larger reads
inline constexpr int32_t kSelfTestMaxTokens = 8;             // computed in double on the CPU
inline constexpr int32_t kCpuRoundRoutes =
    8192;  // routes of all ranks that the CPU backend holds at a time

inline constexpr int32_t kMaxCopyHelpers = 7;  // eight threads move what a PCIe link takes
inline constexpr int64_t kParallelCopyBytes = 512 << 10;  // below: over before a helper is awake
inline constexpr int64_t kCopyPieceBytes = 256 << 10;     // of one helper at a time

// --- process
inline constexpr int32_t kMaxThreads = 1024;               // more than any host has cores
inline constexpr int32_t kMaxServerConfigBytes = 1 << 20;  // a file of a few dozen lines
inline constexpr int64_t kMaxBatchWaitUs = 1'000'000;  // a step that waits a second helps nobody

// --- CPU backend
inline constexpr int64_t kCpuReserveBytes =
    128ll << 20;  // of the memory limit: code, tables of the checkpoint, buffers of connections

// --- CUDA backend
inline constexpr int64_t kCudaStagingBytes =
    256ll << 20;  // pinned, and as much on the device, while weights load
inline constexpr int64_t kCudaReserveBytes =
    512ll << 20;  // device memory left to the driver and its contexts
inline constexpr int64_t kCudaWaitMs =
    10'000;  // a wait in a kernel, for its own rank; never above half of the step's limit
inline constexpr int64_t kCudaPeerWaitMs =
    500;  // a wait for another rank: long beside a late host thread, short beside a caller's wait
inline constexpr double kCudaSlowestFlops =
    1e14;  // a fifth of a large step's: what a peer may still have to compute, beside the above
inline constexpr int64_t kCudaFormMs =
    30'000;  // each collective call that forms the group; mapping a peer takes 40 ms
inline constexpr int64_t kCudaStopGraceMs =
    2'000;  // a kernel told to stop ends within this or never
inline constexpr int64_t kNcclGraceMs =
    1'000;  // beyond a group call's own limit: then its thread is given up
inline constexpr int64_t kNcclGroupBytes =
    448ll << 20;  // NCCL's own on each GPU of a group, beside the window: 436 MiB were seen
inline constexpr int64_t kNcclExchangeBytes =
    704ll << 20;  // NCCL's own, for host-launched sends: 642 MiB were seen for two ranks
inline constexpr int64_t kNcclTeardownMs = 5'000;  // ncclCommAbort was seen to take 0.8 s

// --- time
inline constexpr int64_t kLoadTimeoutS = 3'600;  // 822 GB at 0.25 GB/s
inline constexpr int64_t kMaxLoadTimeoutS = 86'400;
inline constexpr int64_t kMaxTimeoutMs =
    3'600'000;  // any configured wait: an hour is a mistake beyond
inline constexpr int64_t kStepTimeoutMs =
    30'000;  // a step that takes longer is a fault; the largest takes seconds on a CPU
inline constexpr int64_t kRetryPushbackMs = 50;           // queue full: when to come back
inline constexpr int64_t kDrainDeadlineMs = 30'000;       // SIGTERM: what is in flight may finish
inline constexpr int64_t kFailedDrainMs = 1'000;          // a failed process: answers leave
inline constexpr int64_t kClientKeepaliveMinMs = 10'000;  // clients may ping this often
inline constexpr int64_t kServerKeepaliveMs = 20'000;     // the server pings a silent client
inline constexpr int64_t kServerKeepaliveTimeoutMs = 10'000;  // and gives it up
inline constexpr int64_t kShutdownMarginMs =
    10'000;  // beyond the drain deadline: then the process ends hard

// --- client (call, bench and programs that use server/client.h)
inline constexpr int32_t kClientMaxAttempts = 5;    // of one call, its first included
inline constexpr int64_t kClientBackoffMinMs = 20;  // doubles with each attempt, jittered
inline constexpr int64_t kClientBackoffMaxMs = 1'000;
inline constexpr int64_t kClientFallbackReceiveBytes = 64ll << 20;  // a server that names no cap
inline constexpr int32_t kMaxBenchConcurrency = 256;  // one connection and one thread each
inline constexpr int64_t kMaxCallInputBytes = 1ll
                                              << 30;  // --input: JSON is about 10 bytes a number

}  // namespace expertd::limits
