/* A host-memory stand-in for the CANN runtime: "device" memory is malloc'd host
 * memory, streams run at once, events carry a time stamp.  aclnn kernels do
 * nothing (see gen_cann_stub.py); CANN_STUB_TRACE=<file> logs every call with
 * the tensors that were made for it.  A captured graph is a list of what was asked of its stream: copies, waits, and
 * numbers by which whoever computes kernels knows what to do (cann_stub_computes).  For tests of host code only.
 *
 *   CANN_STUB_DEVICES  number of devices (default 1)
 *   CANN_STUB_SOC      SoC name (default Ascend910B3; e.g. Ascend310P3, Ascend910_9391)
 *   CANN_STUB_HBM      device memory in MiB (default 4096)
 *   CANN_STUB_FAIL     "aclnnSwiGlu=161002,aclnnRmsNorm=561103": these kernels refuse
 *   ASCEND_RT_VISIBLE_DEVICES is honoured.  On a 310P a bf16 tensor is refused with 161002.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int err_t;
enum { OK = 0, E_PARAM = 100000, E_REPEAT_INIT = 100002, E_NOT_FOUND = 107002, E_OOM = 207001 };

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static __thread int cur_dev = -1;
static int64_t next_id = 1;
static size_t used[16];

static long env_num(const char *n, long d) { const char *s = getenv(n); return s && *s ? atol(s) : d; }
static uint32_t ndev(void) {
    uint32_t n = (uint32_t)env_num("CANN_STUB_DEVICES", 1), k = 0;
    const char *v = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!v) return n;
    while (*v >= '0' && *v <= '9') {
        char *e; long id = strtol(v, &e, 10);
        if ((uint32_t)id >= n) break;
        k++; if (*e != ',') break; v = e + 1;
    }
    return k; }
static size_t hbm(void) { return (size_t)env_num("CANN_STUB_HBM", 4096) << 20; }

/* ---- trace ---- */
static FILE *trace_file(void) { /* looked up each time: a forked process may have its own */
    static FILE *f; static char opened[1024]; const char *p = getenv("CANN_STUB_TRACE");
    if (!p || !*p) return NULL;
    if (strcmp(p, opened)) { f = !strcmp(p, "1") ? stderr : fopen(p, "a"); snprintf(opened, sizeof opened, "%s", p); }
    return f;
}
static __thread char pending[8192]; static __thread size_t plen;
static void note(const char *fmt, ...) {
    if (!trace_file() || plen > sizeof pending - 300) return;
    va_list a; va_start(a, fmt);
    plen += (size_t)vsnprintf(pending + plen, sizeof pending - plen, fmt, a);
    va_end(a);
}
static __thread int refused;
static long fail_code(const char *name) {
    const char *f = getenv("CANN_STUB_FAIL");
    size_t n = strlen(name); const char *suf = "GetWorkspaceSize";
    if (n > strlen(suf) && !strcmp(name + n - strlen(suf), suf)) n -= strlen(suf);
    while (f && *f) {
        if (!strncmp(f, name, n) && f[n] == '=') return atol(f + n + 1);
        f = strchr(f, ','); if (f) f++;
    }
    return 0;
}
long cann_stub_hit(const char *name) {
    int launch = !strncmp(name, "aclnn", 5) || !strncmp(name, "aclop:", 6) || !strncmp(name, "atb:", 4) || !strncmp(name, "aclmdlRI", 8);
    long rc = fail_code(name);
    if (refused && launch) { rc = rc ? rc : 161002; refused = 0; }
    FILE *f = trace_file();
    if (f && launch) {
        pthread_mutex_lock(&mu);
        fprintf(f, rc ? "%s%s -> %ld\n" : "%s%s\n", name, plen ? pending : "", rc); fflush(f);
        pthread_mutex_unlock(&mu);
        plen = 0; pending[0] = 0;
    }
    return rc;
}

/* ---- life cycle, devices ---- */
err_t aclInit(const char *cfg) { (void)cfg; return OK; }
err_t aclFinalize(void) { return OK; }
const char *aclrtGetSocName(void) { const char *s = getenv("CANN_STUB_SOC"); return s && *s ? s : "Ascend910B3"; }
err_t aclrtGetDeviceCount(uint32_t *n) { *n = ndev(); return OK; }
err_t aclrtSetDevice(int32_t d) { if (d < 0 || (uint32_t)d >= ndev()) return E_PARAM; cur_dev = d; return OK; }
err_t aclrtGetDevice(int32_t *d) { if (cur_dev < 0) return E_NOT_FOUND; *d = cur_dev; return OK; }
err_t aclrtResetDevice(int32_t d) { (void)d; cur_dev = -1; return OK; }
err_t aclrtGetCurrentContext(void **c) { if (cur_dev < 0) { *c = NULL; return E_NOT_FOUND; } *c = (void *)(uintptr_t)(0x1000 + cur_dev); return OK; }
err_t aclrtSetCurrentContext(void *c) { cur_dev = (int)((uintptr_t)c - 0x1000); return OK; }
err_t aclrtGetPrimaryCtxState(int32_t d, uint32_t *flags, int32_t *active) { (void)flags; *active = d == cur_dev; return OK; }
err_t aclrtSetDeviceSatMode(int m) { (void)m; return OK; }
err_t aclrtSetOpExecuteTimeOut(uint32_t t) { (void)t; return OK; }
err_t aclrtSetOpWaitTimeout(uint32_t t) { (void)t; return OK; }
err_t aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { (void)a; (void)b; *can = 1; return OK; }
err_t aclrtDeviceEnablePeerAccess(int32_t a, uint32_t f) { (void)a; (void)f; return OK; }
err_t aclrtGetDeviceUtilizationRate(int32_t d, int32_t *info) { (void)d; info[0] = info[1] = info[2] = info[3] = 0; return OK; }
const char *aclGetRecentErrMsg(void) { return "stub"; }
static int64_t sysopt[64];
err_t aclrtGetSysParamOpt(int o, int64_t *v) { if (o < 0 || o > 63) return E_PARAM; *v = sysopt[o]; return OK; }
err_t aclrtCtxSetSysParamOpt(int o, int64_t v) { (void)o; (void)v; return OK; }
err_t aclrtSetSysParamOpt(int o, int64_t v) { if (o < 0 || o > 63) return E_PARAM; sysopt[o] = v; return OK; }
err_t aclGetCompileopt(int o, char *v, size_t n) { (void)o; if (n) v[0] = 0; return OK; }
size_t aclGetCompileoptSize(int o) { (void)o; return 1; }
err_t aclSetCompileopt(int o, const char *v) { (void)o; (void)v; return OK; }

struct event { struct timespec t; int recorded, external; };
/* ---- graphs: a list of what a capturing stream was asked to do, done again at each execution ---- */
enum { COPY, SET, KERNEL, WAIT, RESET, RECORD, GROUP };
struct list { struct entry { int kind, value; void *to; const void *from; size_t size; long id; struct list *group; } *v; size_t n, room; };
struct model { struct list all; void *stream; struct list *into; int broken; uint32_t id; };
static struct model *capturing;               /* at most one in a process */
static __thread int capturing_here;
static struct list *updated; static void *updating; /* a task group that gets new calls, from this stream */
static int (*compute)(long id, int what);     /* what: 0 compute, 1 forget */
enum { E_CAPTURED = 107030, E_SPOILED = 107025, E_NEVER = 507000 };

static struct list *recorded_by(void *stream) {
    if (updated && stream == updating) return updated;
    return capturing && stream == capturing->stream ? capturing->into : NULL; }
static int add(void *stream, struct entry e) {
    struct list *l = recorded_by(stream);
    if (!l) return 0;
    if (l->n == l->room) { l->room = l->room ? 2 * l->room : 16; l->v = realloc(l->v, l->room * sizeof *l->v); }
    l->v[l->n++] = e; return 1; }
static void clear(struct list *l) {
    for (size_t i = 0; i < l->n; i++) {
        struct entry *e = &l->v[i];
        if (e->kind == KERNEL && compute) compute(e->id, 1);
        if (e->kind == GROUP) { clear(e->group); free(e->group); }
    }
    free(l->v); l->v = NULL; l->n = l->room = 0; }
/* for whoever computes: whether anything is being recorded, and a kernel of this stream */
void cann_stub_computes(int (*function)(long, int)) { compute = function; }
int cann_stub_recording(void) { return capturing != NULL || updated != NULL; }
int cann_stub_add(void *stream, long id) { return add(stream, (struct entry){.kind = KERNEL, .id = id}); }
/* what waits for the device spoils a capture of the same thread */
static err_t waits(void) {
    if (!capturing || !capturing_here) return OK;
    capturing->broken = 1; return E_CAPTURED; }

/* ---- memory ---- */
struct head { uint64_t magic; size_t size; int dev; void *raw; };
#define MAGIC 0xA5CE4DULL
static err_t dev_alloc(void **p, size_t n) {
    int d = cur_dev < 0 ? 0 : cur_dev;
    pthread_mutex_lock(&mu);
    if (used[d] + n > hbm()) { pthread_mutex_unlock(&mu); return E_OOM; }
    used[d] += n; pthread_mutex_unlock(&mu);
    char *raw = malloc(n + 1024); if (!raw) return E_OOM;
    char *q = (char *)(((uintptr_t)raw + sizeof(struct head) + 511) & ~(uintptr_t)511);
    struct head *h = (struct head *)q - 1; h->magic = MAGIC; h->size = n; h->dev = d; h->raw = raw;
    *p = q; return OK;
}
err_t aclrtMalloc(void **p, size_t n, int pol) { (void)pol; return dev_alloc(p, n); }
err_t aclrtMallocAlign32(void **p, size_t n, int pol) { (void)pol; return dev_alloc(p, n); }
err_t aclrtFree(void *p) {
    if (!p) return OK;
    struct head *h = (struct head *)p - 1; if (h->magic != MAGIC) return E_PARAM;
    pthread_mutex_lock(&mu); used[h->dev] -= h->size; pthread_mutex_unlock(&mu);
    h->magic = 0; free(h->raw); return OK;
}
err_t aclrtMallocHost(void **p, size_t n) { return posix_memalign(p, 64, n ? n : 64) ? E_OOM : OK; }
err_t aclrtMallocHostWithCfg(void **p, uint64_t n, void *cfg) { (void)cfg; return aclrtMallocHost(p, n); }
err_t aclrtFreeHost(void *p) { free(p); return OK; }
err_t aclrtMemcpy(void *d, size_t dm, const void *s, size_t n, int k) { (void)k; if (n > dm) return E_PARAM; memmove(d, s, n); return OK; }
err_t aclrtMemcpyAsync(void *d, size_t dm, const void *s, size_t n, int k, void *st) {
    if (recorded_by(st) && k != 3) return waits();      /* only copies inside the device are recorded here */
    return add(st, (struct entry){.kind = COPY, .to = d, .from = s, .size = n}) ? OK : aclrtMemcpy(d, dm, s, n, k); }
err_t aclrtMemset(void *d, size_t m, int32_t v, size_t n) { if (n > m) return E_PARAM; memset(d, v, n); return OK; }
err_t aclrtMemsetAsync(void *d, size_t m, int32_t v, size_t n, void *st) {
    return add(st, (struct entry){.kind = SET, .to = d, .value = v, .size = n}) ? OK : aclrtMemset(d, m, v, n); }
err_t aclrtGetMemInfo(int attr, size_t *fr, size_t *tot) { (void)attr; int d = cur_dev < 0 ? 0 : cur_dev; *tot = hbm(); *fr = hbm() - used[d]; return OK; }

/* ---- streams, events ---- */
struct stream { int64_t id; };
static err_t mk_stream(void **s) { struct stream *x = malloc(sizeof *x); pthread_mutex_lock(&mu); x->id = next_id++; pthread_mutex_unlock(&mu); *s = x; return OK; }
err_t aclrtCreateStream(void **s) { return mk_stream(s); }
err_t aclrtCreateStreamWithConfig(void **s, uint32_t p, uint32_t f) { (void)p; (void)f; return mk_stream(s); }
err_t aclrtDestroyStream(void *s) { free(s); return OK; }
err_t aclrtDestroyStreamForce(void *s) { free(s); return OK; }
err_t aclrtSynchronizeDevice(void) { return waits(); }
err_t aclrtSynchronizeDeviceWithTimeout(int32_t t) { (void)t; return waits(); }
err_t aclrtSynchronizeStream(void *s) { (void)s; return waits(); }
err_t aclrtSynchronizeStreamWithTimeout(void *s, int32_t t) { (void)s; (void)t; return waits(); }
err_t aclrtStreamQuery(void *s, int *st) { (void)s; *st = 0; return OK; }
err_t aclrtStreamGetId(void *s, int32_t *id) { *id = s ? (int32_t)((struct stream *)s)->id : 0; return OK; }
err_t aclrtSetStreamFailureMode(void *s, uint64_t m) { (void)s; (void)m; return OK; }
err_t aclrtSetStreamOverflowSwitch(void *s, uint32_t f) { (void)s; (void)f; return OK; }
err_t aclrtGetStreamOverflowSwitch(void *s, uint32_t *f) { (void)s; *f = 0; return OK; }
/* an external event (flag 0x20) is a part of a graph that something outside fulfils */
err_t aclrtCreateEventExWithFlag(void **e, uint32_t f) { struct event *x = calloc(1, sizeof *x); x->external = (f & 0x20) != 0; *e = x; return OK; }
err_t aclrtCreateEventWithFlag(void **e, uint32_t f) { return aclrtCreateEventExWithFlag(e, f); }
err_t aclrtDestroyEvent(void *e) { free(e); return OK; }
static int noted(int kind, struct event *e, void *s) { return e->external && add(s, (struct entry){.kind = kind, .to = e}); }
err_t aclrtRecordEvent(void *e, void *s) {
    struct event *x = e; if (noted(RECORD, x, s)) return OK;
    clock_gettime(CLOCK_MONOTONIC, &x->t); x->recorded = 1; return OK; }
err_t aclrtResetEvent(void *e, void *s) { if (!noted(RESET, e, s)) ((struct event *)e)->recorded = 0; return OK; }
err_t aclrtStreamWaitEvent(void *s, void *e) { noted(WAIT, e, s); return OK; }
err_t aclrtSynchronizeEvent(void *e) { (void)e; return OK; }
err_t aclrtQueryEventStatus(void *e, int *st) { (void)e; *st = 1; return OK; }      /* complete */
err_t aclrtQueryEventWaitStatus(void *e, int *st) { (void)e; *st = 0; return OK; }  /* complete */
err_t aclrtEventElapsedTime(float *ms, void *a, void *b) {
    struct event *x = a, *y = b;
    *ms = (float)((y->t.tv_sec - x->t.tv_sec) * 1e3 + (y->t.tv_nsec - x->t.tv_nsec) / 1e6); return OK; }

/* ---- aclnn argument objects ---- */
static const char *dt(int t) {
    static const char *n[] = {"f32","f16","i8","i32","u8","?","i16","u16","u32","i64","u64","f64","bool","str",
                              "?","?","c64","c128"};
    return t == 27 ? "bf16" : t == 29 ? "i4" : t >= 0 && t < 18 ? n[t] : "?"; }
void *aclCreateTensor(const int64_t *dims, uint64_t nd, int type, const int64_t *stride, int64_t off, int fmt,
                      const int64_t *sd, uint64_t nsd, void *data) {
    (void)stride; (void)off; (void)sd; (void)nsd; (void)data;
    if (type == 27 && !strncmp(aclrtGetSocName(), "Ascend310P", 10)) refused = 1;
    note(" %s[", dt(type));
    for (uint64_t i = 0; i < nd; i++) note(i ? ",%ld" : "%ld", (long)dims[i]);
    note(fmt == 2 ? "]" : "]fmt%d", fmt);
    return malloc(8); }
void *aclCreateScalar(void *v, int t) { (void)v; note(" scalar:%s", dt(t)); return malloc(8); }
void *aclCreateIntArray(const int64_t *v, uint64_t n) {
    note(" ints("); for (uint64_t i = 0; i < n && i < 16; i++) note(i ? ",%ld" : "%ld", (long)v[i]); note(")"); return malloc(8); }
void *aclCreateFloatArray(const float *v, uint64_t n) { (void)v; note(" floats(%lu)", (unsigned long)n); return malloc(8); }
void *aclCreateBoolArray(const char *v, uint64_t n) { (void)v; note(" bools(%lu)", (unsigned long)n); return malloc(8); }
void *aclCreateTensorList(void *const *v, uint64_t n) { (void)v; note(" list(%lu)", (unsigned long)n); return malloc(8); }
void *aclCreateScalarList(void *const *v, uint64_t n) { (void)v; note(" scalars(%lu)", (unsigned long)n); return malloc(8); }
#define DESTROY(N) err_t aclDestroy##N(void *p) { free(p); return OK; }
DESTROY(Tensor) DESTROY(Scalar) DESTROY(IntArray) DESTROY(FloatArray) DESTROY(BoolArray)
/* lists own their items in CANN; here the items leak, which a test can afford */
DESTROY(TensorList) DESTROY(ScalarList)
err_t aclDestroyAclOpExecutor(void *p) { (void)p; return OK; }

/* ---- device facts ---- */
err_t aclGetDeviceCapability(uint32_t d, int what, int64_t *v) { (void)d; (void)what; *v = 24; return OK; }
err_t aclrtGetDeviceInfo(uint32_t d, int what, int64_t *v) { (void)d; (void)what; *v = 0; return OK; }

/* ---- graphs, as torch_npu calls them ---- */
err_t aclmdlRICaptureBegin(void *s, int mode) {
    (void)mode; if (capturing) return E_PARAM;
    struct model *m = calloc(1, sizeof *m); m->stream = s; m->into = &m->all; m->id = (uint32_t)next_id++;
    capturing = m; capturing_here = 1; cann_stub_hit("aclmdlRICaptureBegin"); return OK; }
err_t aclmdlRICaptureEnd(void *s, void **ri) {
    (void)s; struct model *m = capturing; if (!m) return E_PARAM;
    capturing = NULL; capturing_here = 0; *ri = m;
    if (!m->broken) return OK;
    clear(&m->all); free(m); *ri = NULL; return E_SPOILED; }
err_t aclmdlRICaptureGetInfo(void *s, int *status, void **ri) {
    int here = capturing && s == capturing->stream;
    *status = !here ? 0 : capturing->broken ? 2 : 1; if (ri) *ri = here ? capturing : NULL; return OK; }
err_t aclmdlRICaptureThreadExchangeMode(int *m) { (void)m; return OK; }
err_t aclmdlRICaptureTaskGrpBegin(void *s) {
    if (!recorded_by(s)) return E_PARAM;
    struct list *group = calloc(1, sizeof *group);
    add(s, (struct entry){.kind = GROUP, .group = group}); capturing->into = group; return OK; }
err_t aclmdlRICaptureTaskGrpEnd(void *s, void **h) {
    if (!recorded_by(s) || capturing->into == &capturing->all) return E_PARAM;
    *h = capturing->into; capturing->into = &capturing->all; return OK; }
err_t aclmdlRICaptureTaskUpdateBegin(void *s, void *h) { updated = h; updating = s; clear(updated); return OK; }
err_t aclmdlRICaptureTaskUpdateEnd(void *s) { (void)s; updated = NULL; return OK; }
static err_t execute(struct list *l) {
    err_t rc = OK;
    for (size_t i = 0; i < l->n && !rc; i++) {
        struct entry *e = &l->v[i]; struct event *x = e->to;
        switch (e->kind) {
        case COPY: memmove(e->to, e->from, e->size); break;
        case SET: memset(e->to, e->value, e->size); break;
        case KERNEL: rc = compute ? compute(e->id, 0) : OK; break;
        case GROUP: rc = execute(e->group); break;
        case RESET: x->recorded = 0; break;
        case RECORD: x->recorded = 1; break;
        case WAIT: rc = x->recorded ? OK : E_NEVER; break; /* a device would wait for ever */
        }
    }
    return rc; }
err_t aclmdlRIExecuteAsync(void *ri, void *s) { (void)s; cann_stub_hit("aclmdlRIExecuteAsync"); return execute(&((struct model *)ri)->all); }
err_t aclmdlRIDestroy(void *ri) { clear(&((struct model *)ri)->all); free(ri); return OK; }
err_t aclmdlRIGetId(void *ri, uint32_t *id) { *id = ((struct model *)ri)->id; return OK; }

/* ---- HCCL, one rank only ---- */
static size_t hsize(int t) { static const size_t n[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2}; return t >= 0 && t < 12 ? n[t] : 1; }
err_t HcclGetRootInfo(void *ri) { memset(ri, 0, 4); return OK; }
err_t HcclCommInitRootInfo(uint32_t n, const void *ri, uint32_t rank, void **c) { (void)ri; (void)rank; if (n != 1) return 4; *c = malloc(8); return OK; }
err_t HcclCommInitRootInfoConfig(uint32_t n, const void *ri, uint32_t rank, const void *cfg, void **c) { (void)cfg; return HcclCommInitRootInfo(n, ri, rank, c); }
err_t HcclCommDestroy(void *c) { free(c); return OK; }
err_t HcclGetCommAsyncError(void *c, int *e) { (void)c; *e = 0; return OK; }
err_t HcclGetCommName(void *c, char *n) { (void)c; strcpy(n, "stub"); return OK; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }
err_t HcclAllReduce(void *s, void *r, uint64_t n, int t, int op, void *c, void *st) { (void)op; (void)c; (void)st; memmove(r, s, n * hsize(t)); cann_stub_hit("HcclAllReduce"); return OK; }
err_t HcclAllGather(void *s, void *r, uint64_t n, int t, void *c, void *st) { (void)c; (void)st; memmove(r, s, n * hsize(t)); return OK; }
err_t HcclReduceScatter(void *s, void *r, uint64_t n, int t, int op, void *c, void *st) { (void)op; (void)c; (void)st; memmove(r, s, n * hsize(t)); return OK; }
err_t HcclBroadcast(void *b, uint64_t n, int t, uint32_t root, void *c, void *st) { (void)b; (void)n; (void)t; (void)root; (void)c; (void)st; return OK; }

/* ---- the older "aclop" route, which torch_npu takes for many ops on a 310P ---- */
void *aclCreateTensorDesc(int type, int nd, const int64_t *dims, int fmt) {
    if (type == 27 && !strncmp(aclrtGetSocName(), "Ascend310P", 10)) refused = 1;
    note(" %s[", dt(type));
    for (int i = 0; i < nd; i++) note(i ? ",%ld" : "%ld", (long)dims[i]);
    note(fmt == 2 ? "]" : "]fmt%d", fmt);
    return malloc(8); }
void aclDestroyTensorDesc(const void *d) { free((void *)d); }
void *aclCreateDataBuffer(void *p, size_t n) { (void)p; (void)n; return malloc(8); }
err_t aclDestroyDataBuffer(const void *b) { free((void *)b); return OK; }
err_t aclSetTensorFormat(void *d, int f) { (void)d; (void)f; return OK; }
err_t aclSetTensorShape(void *d, int n, const int64_t *s) { (void)d; (void)n; (void)s; return OK; }
void aclSetTensorDescName(void *d, const char *n) { (void)d; (void)n; }
void *aclopCreateAttr(void) { return malloc(8); }
void aclopDestroyAttr(const void *a) { free((void *)a); }
static err_t aclop(const char *op) {
    char b[128]; snprintf(b, sizeof b, "aclop:%s", op);
    return (err_t)cann_stub_hit(b); }
err_t aclopCompileAndExecute(const char *op, ...) { return aclop(op); }
err_t aclopCompileAndExecuteV2(const char *op, ...) { return aclop(op); }

/* ---- ATB: one object stands for every operation and context; all of its virtual functions succeed ---- */
static long atb_succeed(void) { return 0; }
static void *atb_functions[64] = {[0 ... 63] = (void *)atb_succeed};
void *cann_stub_object = atb_functions;
