// The objects that aclnn, ATB and aclop calls are made with. They carry what a caller asks back and nothing else;
// the bytes of a result are filled elsewhere (launches.cpp).

#include <cstring>

#include "device.h"

namespace standin {
namespace {

struct TensorRecord {
    std::vector<int64_t> sizes;
    int dtype = 0;
    int format = 0;
};

struct AnyRecord {
    char nothing[64] = {};
};

}  // namespace

extern "C" {

void* aclCreateTensor(const int64_t* sizes, uint64_t rank, int dtype, const int64_t*, int64_t, int format,
                      const int64_t*, uint64_t, void*) {
    auto* record = new TensorRecord;
    if (sizes) record->sizes.assign(sizes, sizes + rank);
    record->dtype = dtype;
    record->format = format;
    return record;
}

int aclGetViewShape(const void* tensor, int64_t** sizes, uint64_t* rank) {
    const auto* record = static_cast<const TensorRecord*>(tensor);
    *rank = record->sizes.size();
    *sizes = new int64_t[record->sizes.size() + 1];      // the caller owns it
    std::memcpy(*sizes, record->sizes.data(), record->sizes.size() * sizeof(int64_t));
    return kSuccess;
}

int aclDestroyTensor(const void* tensor) {
    delete static_cast<const TensorRecord*>(tensor);
    return kSuccess;
}

// Shape and format of a tensor cast to another storage format: FRACTAL_NZ (29) keeps blocks of 16 rows by 16 columns
// (32 for 8-bit integers), any other format the shape itself. The caller owns the array.
int aclnnNpuFormatCastCalculateSizeAndFormat(const void* source, int format, int, int64_t** sizes, uint64_t* rank,
                                             int* actual) {
    const auto* record = static_cast<const TensorRecord*>(source);
    std::vector<int64_t> made = record->sizes;
    if (format == 29 && made.size() >= 2) {
        const bool bytes = record->dtype == 2 || record->dtype == 4;      // ACL_INT8, ACL_UINT8
        const int64_t width = bytes ? 32 : 16, rows = made[made.size() - 2], columns = made.back();
        made.resize(made.size() - 2);
        made.insert(made.end(), {(columns + width - 1) / width, (rows + 15) / 16, 16, width});
    }
    *sizes = new int64_t[made.size() + 1];
    std::memcpy(*sizes, made.data(), made.size() * sizeof(int64_t));
    *rank = made.size();
    *actual = format;
    return kSuccess;
}

void* aclCreateTensorDesc(int dtype, int rank, const int64_t* sizes, int format) {
    auto* record = new TensorRecord;
    if (sizes) record->sizes.assign(sizes, sizes + rank);
    record->dtype = dtype;
    record->format = format;
    return record;
}

void aclDestroyTensorDesc(const void* record) { delete static_cast<const TensorRecord*>(record); }
int aclGetTensorDescType(const void* record) { return static_cast<const TensorRecord*>(record)->dtype; }
int aclGetTensorDescFormat(const void* record) { return static_cast<const TensorRecord*>(record)->format; }
size_t aclGetTensorDescNumDims(const void* record) { return static_cast<const TensorRecord*>(record)->sizes.size(); }

int aclGetTensorDescDimV2(const void* record, size_t place, int64_t* size) {
    const auto& sizes = static_cast<const TensorRecord*>(record)->sizes;
    if (place >= sizes.size()) return kParamInvalid;
    *size = sizes[place];
    return kSuccess;
}

#define RECORD(NAME)                                            \
    void* aclCreate##NAME() { return new AnyRecord; }           \
    int aclDestroy##NAME(const void* record) {                  \
        delete static_cast<const AnyRecord*>(record);           \
        return kSuccess;                                        \
    }
RECORD(Scalar)
RECORD(IntArray)
RECORD(FloatArray)
RECORD(BoolArray)
RECORD(ScalarList)
RECORD(Fp16Array)
RECORD(Bf16Array)
RECORD(DataBuffer)
#undef RECORD

struct TensorListRecord {
    std::vector<const void*> tensors;
};

void* aclCreateTensorList(const void* const* tensors, uint64_t amount) {
    auto* list = new TensorListRecord;
    list->tensors.assign(tensors, tensors + amount);
    return list;
}

int aclDestroyTensorList(const void* list) {             // a list owns its tensors
    const auto* record = static_cast<const TensorListRecord*>(list);
    for (const void* tensor : record->tensors) aclDestroyTensor(tensor);
    delete record;
    return kSuccess;
}

int aclDestroyAclOpExecutor(void*) { return kSuccess; }

void* aclopCreateAttr() { return new AnyRecord; }
void aclopDestroyAttr(const void* record) { delete static_cast<const AnyRecord*>(record); }

int aclopCompileAndExecute(const char* type, int, const void*, const void*, int, const void*, void*, const void*,
                           int, int, const char*, void* stream) {
    if (const int code = refuse(type)) return code;
    return launch(type, stream);
}

int aclopCompileAndExecuteV2(const char* type, int, void*, void*, int, void*, void*, void*, int, int, const char*,
                             void* stream) {
    if (const int code = refuse(type)) return code;
    return launch(type, stream);
}

}  // extern "C"

// --- ATB: operations are objects with virtual functions, in the order of its public header atb/operation.h ----------

namespace {

struct AtbContext {
    virtual int set_stream(void* stream) {
        stream_ = stream;
        return kSuccess;
    }
    virtual void* stream() const { return stream_; }
    virtual int spare2() { return kSuccess; }
    virtual int spare3() { return kSuccess; }
    virtual int spare4() { return kSuccess; }
    virtual int spare5() { return kSuccess; }
    virtual int spare6() { return kSuccess; }
    virtual int spare7() { return kSuccess; }
    virtual int spare8() { return kSuccess; }
    virtual int spare9() { return kSuccess; }
    void* stream_ = nullptr;
};

struct AtbOperation {
    explicit AtbOperation(const char* kernel) : kernel_(kernel) {}
    virtual ~AtbOperation() = default;
    virtual std::string name() const { return kernel_; }
    virtual int infer_shape(const void*, void*) const { return kSuccess; }
    virtual uint32_t inputs() const { return 0; }
    virtual uint32_t outputs() const { return 0; }
    virtual int setup(const void*, uint64_t& workspace, void*) {
        workspace = 0;
        const int code = refuse(kernel_);
        if (code) take_python_back();
        return code;
    }
    virtual int execute(const void*, uint8_t*, uint64_t, void* context) {
        return launch(kernel_, static_cast<AtbContext*>(context)->stream_);
    }
    const char* kernel_;
};

}  // namespace

int create_atb_operation(const char* kernel, void** operation) {
    *operation = new AtbOperation(kernel);
    return kSuccess;
}

int destroy_atb_operation(void* operation) {
    delete static_cast<AtbOperation*>(operation);
    return kSuccess;
}

int create_atb_context(void** context) {
    *context = new AtbContext;
    return kSuccess;
}

int destroy_atb_context(void* context) {
    delete static_cast<AtbContext*>(context);
    return kSuccess;
}

}  // namespace standin
