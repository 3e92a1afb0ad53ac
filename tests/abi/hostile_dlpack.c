/*
 * Hostile calls of DLPack's functions, and an export that C consumes. See hostile.c.
 */
#include "hostile.h"

/* A tensor of the first 64 bytes of the token's page. */
static VbarDlpackTensor good_tensor(void) {
    VbarBarInfo info = {.size = sizeof info};
    OK(vbar_bar_info(world.bar, &info));
    VbarDlpackTensor tensor = {.size = sizeof tensor, .address = info.address};
    static const uint64_t shape[] = {4, 16};
    tensor.shape = shape;
    tensor.rank = 2;
    tensor.dtype = VBAR_DTYPE_U8;
    return tensor;
}

#define EXPORT_FAILS(tensor, status, words) \
    do { \
        FAILS(vbar_dlpack_export(world.token, 0, &(tensor), untouched()), status, words); \
        CHECK(is_untouched()); \
    } while (0)

/* What C sees of dlpack.h's DLManagedTensor, without a version. */
struct ManagedTensor {
    void *data;
    int32_t device_type, device_id, rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*deleter)(struct ManagedTensor *);
};

static void c_consumes_an_export(void) {
    VbarDlpackTensor tensor = good_tensor();
    tensor.form = VBAR_DLPACK_FORM_UNVERSIONED;
    VbarFault fault;
    OK(vbar_bar_fault(world.bar, 0, 64, 0, &fault));
    void *exported;
    OK(vbar_dlpack_export(fault.token, 0, &tensor, &exported));
    struct ManagedTensor *managed = exported;
    CHECK((uintptr_t)managed->data == tensor.address && managed->device_type == 2);
    CHECK(managed->rank == 2 && managed->shape[0] == 4 && managed->shape[1] == 16);
    CHECK(managed->strides[0] == 16 && managed->strides[1] == 1 && managed->byte_offset == 0);
    CHECK(managed->code == 1 && managed->bits == 8 && managed->lanes == 1);
    VbarPage page;
    OK(vbar_bar_residency(world.bar, 0, 1, &page));
    uint32_t held = page.pin_count;
    /* The pins are the consumer's: nobody takes them by the token that had them. */
    FAILS(vbar_dlpack_export(fault.token, 0, &tensor, untouched()), VBAR_STATUS_STALE_TOKEN,
          "exported");
    CHECK(is_untouched());
    FAILS(vbar_token_unpin(fault.token, 0), VBAR_STATUS_STALE_TOKEN, "exported");
    FAILS(vbar_token_also_used_on(fault.token, 0), VBAR_STATUS_STALE_TOKEN, "exported");
    OK(vbar_bar_residency(world.bar, 0, 1, &page));
    CHECK(page.pin_count == held);
    managed->deleter(managed);
    OK(vbar_bar_residency(world.bar, 0, 1, &page));
    CHECK(page.pin_count == held - 1);
    FAILS(vbar_token_unpin(fault.token, 0), VBAR_STATUS_STALE_TOKEN, NULL);
}

CASE(vbar_dlpack_export) {
    VbarDlpackTensor tensor = good_tensor(), bad = tensor;
    BAD_PLACES(void *, place, vbar_dlpack_export(world.token, 0, &tensor, place));
    EACH_BAD_ID(TOKEN, VbarToken, id, vbar_dlpack_export(id, 0, &tensor, untouched()));
    FAILS(vbar_dlpack_export(world.token, 0, NULL, untouched()), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    const size_t sizes[] = {0, 1, sizeof tensor - 1, 65537, SIZE_MAX};
    for (size_t at = 0; at < COUNT_OF(sizes); at++) {
        bad.size = sizes[at];
        EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "size field");
    }
    bad = tensor, bad.shape = NULL;
    EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    bad = tensor, bad.rank = UINT32_MAX;
    EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "dimensions");
    bad = tensor, bad.form = 2;
    EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "form is 2");
    bad = tensor, bad.access = 2;
    EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "access is 2");
    bad = tensor, bad.dtype = VBAR_DTYPE_F6_E3M2;
    EXPORT_FAILS(bad, VBAR_STATUS_UNSUPPORTED, "6-bit");
    bad = tensor, bad.dtype = VBAR_DTYPE_F64, bad.address += 4;
    EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "not aligned");
    for (size_t at = 0; at < edge_count; at++) {
        if (edges[at] > UINT32_MAX || edges[at] <= VBAR_DTYPE_U64) continue;
        bad = tensor, bad.dtype = (uint32_t)edges[at];
        EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "type");
    }
    for (size_t at = 0; at < edge_count; at++) {
        bad = tensor, bad.address = edges[at];
        EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, "token's pages");
        uint64_t shape[] = {edges[at], 1};
        if (edges[at] * 1 <= world.page) continue;
        bad = tensor, bad.shape = shape;
        EXPORT_FAILS(bad, VBAR_STATUS_INVALID_ARGUMENT, NULL);
    }
    c_consumes_an_export();
}

/* What stands in for Python: one capsule, which is it only by its address. */
static struct {
    const char *name;
    void *pointer;
} capsule;

typedef void (*Function)(void);

/* POSIX has them of one size, and dlsym would return them so. */
static void *place_of(Function function) {
    void *place;
    memcpy(&place, &function, sizeof place);
    return place;
}

static int capsule_is_valid(void *asked, const char *name) {
    return asked == &capsule && strcmp(name, capsule.name) == 0;
}

static void *capsule_get_pointer(void *asked, const char *name) {
    CHECK(capsule_is_valid(asked, name));
    return capsule.pointer;
}

static int capsule_set_pointer(void *asked, void *pointer) {
    CHECK(asked == &capsule && pointer != NULL);
    capsule.pointer = pointer;
    return 0;
}

static int capsule_set_name(void *asked, const char *name) {
    CHECK(asked == &capsule);
    capsule.name = name;
    return 0;
}

CASE(vbar_dlpack_set_capsule_functions) {
    int function;
    for (unsigned missing = 1; missing < 16; missing++) {
        void *told[4];
        for (unsigned at = 0; at < 4; at++) told[at] = missing >> at & 1 ? NULL : &function;
        FAILS(vbar_dlpack_set_capsule_functions(told[0], told[1], told[2], told[3]),
              VBAR_STATUS_INVALID_ARGUMENT, "NULL");
    }
}

CASE(vbar_dlpack_export_capsule) {
    VbarDlpackTensor tensor = good_tensor(), bad = tensor;
    static char empty[] = "vbar_dlpack_empty";
    capsule.name = empty, capsule.pointer = empty;
    /* Nothing is known of Python yet, so whatever this is it is no capsule. */
    FAILS(vbar_dlpack_export_capsule(world.token, 0, &tensor, &capsule),
          VBAR_STATUS_INVALID_ARGUMENT, "no empty capsule");
    OK(vbar_dlpack_set_capsule_functions(
        place_of((Function)capsule_is_valid), place_of((Function)capsule_get_pointer),
        place_of((Function)capsule_set_pointer), place_of((Function)capsule_set_name)));
    int nothing = 0;
    EACH_BAD_ID(TOKEN, VbarToken, id, (vbar_dlpack_export_capsule(id, 0, &tensor, &capsule)));
    FAILS(vbar_dlpack_export_capsule(world.token, 0, &tensor, NULL), VBAR_STATUS_INVALID_ARGUMENT,
          "no empty capsule");
    FAILS(vbar_dlpack_export_capsule(world.token, 0, &tensor, &nothing),
          VBAR_STATUS_INVALID_ARGUMENT, "no empty capsule");
    FAILS(vbar_dlpack_export_capsule(world.token, 0, NULL, &capsule), VBAR_STATUS_INVALID_ARGUMENT,
          "NULL");
    bad.dtype = VBAR_DTYPE_F6_E2M3;
    FAILS(vbar_dlpack_export_capsule(world.token, 0, &bad, &capsule), VBAR_STATUS_UNSUPPORTED,
          "6-bit");
    /* An empty one has nothing to delete, and is as it was. */
    vbar_dlpack_capsule_destructor(&capsule);
    CHECK(capsule.name == empty && capsule.pointer == empty);
    const char *const names[] = {"dltensor_versioned", "dltensor"};
    for (uint32_t form = 0; form < 2; form++) {
        VbarFault fault;
        VbarPage before, after;
        OK(vbar_bar_residency(world.bar, 0, 1, &before));
        OK(vbar_bar_fault(world.bar, 0, 64, 0, &fault));
        tensor.form = form;
        capsule.name = empty, capsule.pointer = empty;
        OK(vbar_dlpack_export_capsule(fault.token, 0, &tensor, &capsule));
        CHECK(strcmp(capsule.name, names[form]) == 0 && capsule.pointer != empty);
        FAILS(vbar_token_unpin(fault.token, 0), VBAR_STATUS_STALE_TOKEN, "exported");
        /* It is full. */
        FAILS(vbar_dlpack_export_capsule(world.token, 0, &tensor, &capsule),
              VBAR_STATUS_INVALID_ARGUMENT, "no empty capsule");
        OK(vbar_bar_residency(world.bar, 0, 1, &after));
        CHECK(after.pin_count == before.pin_count + 1);
        /* Of one that was consumed nothing is deleted. */
        capsule.name = "used_dltensor";
        vbar_dlpack_capsule_destructor(&capsule);
        OK(vbar_bar_residency(world.bar, 0, 1, &after));
        CHECK(after.pin_count == before.pin_count + 1);
        capsule.name = names[form];
        vbar_dlpack_capsule_destructor(&capsule);
        OK(vbar_bar_residency(world.bar, 0, 1, &after));
        CHECK(after.pin_count == before.pin_count);
    }
    capsule.name = empty;
}

CASE(vbar_dlpack_capsule_destructor) {
    /* Whatever this is, it is no capsule. */
    int nothing = 0;
    vbar_dlpack_capsule_destructor(NULL);
    vbar_dlpack_capsule_destructor(&nothing);
}

const struct Case dlpack_cases[] = {
    ENTRY(vbar_dlpack_export),
    ENTRY(vbar_dlpack_set_capsule_functions),
    ENTRY(vbar_dlpack_export_capsule),
    ENTRY(vbar_dlpack_capsule_destructor),
    {NULL, NULL},
};
