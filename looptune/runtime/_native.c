/* The call path without Python: argument checks, scratch, threads and timing.
 *
 * `Entry(stages, tensors, scratch_bytes, release_gil, name)` runs the machine code of a kernel.
 * Calling it checks plain buffers and answers NotImplemented for everything unusual, which the
 * Python path then accepts or refuses with a typed error. The code of a stage is
 * f(operand pointers, scratch, begin, end); the kernel object keeps it alive.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 64
#define MAX_DIMS 64 /* NumPy's own limit */
#define KEPT_SCRATCH 16
#define MAX_THREADS 4096
#define SPIN_NANOSECONDS 200000 /* waking a thread that blocks may take as long; so may a pack by one */
#define HUGE_PAGE ((size_t)2 << 20)

typedef void (*Code)(void *const *, void *, int64_t, int64_t);

typedef struct {
    Code code;
    int count;
    int *tensors;
    int64_t trips;
    size_t private_bytes; /* of scratch that each thread wants for itself, 0 for shared scratch */
} Stage;

typedef struct {
    char format;
    int ndim, item; /* dimensions, bytes of an element */
    Py_ssize_t shape[MAX_DIMS];
    Py_ssize_t strides[MAX_DIMS];
    Py_ssize_t low, high; /* byte offsets of the first element and behind the last */
    Py_ssize_t scratch_offset; /* -1 for an argument */
    int empty;
} Tensor;

typedef struct {
    PyObject_HEAD
    int stage_count, tensor_count, argument_count, most_operands;
    Stage *stages;
    Tensor *tensors;
    size_t scratch_bytes;
    int release_gil;
    int threads;
    int kept;
    void *scratch[KEPT_SCRATCH];
} Entry;

static PyObject *out_name, *entry_type;

/* ---- threads: a small pool; the caller always works, too ----
 *
 * Waits spin for as long as waking would take, then block: kernels called one after another find
 * their workers awake, and an idle pool burns nothing. Joining and leaving a job take no lock, since
 * a lock that is held for a moment would put a spinning thread to sleep. A worker that sleeps, or was
 * last seen on the caller's core, is sent to another, and free to go anywhere again once it is there:
 * left alone, the scheduler may keep both on one core for several milliseconds. It wakes threads
 * beside their waker where no core looks idle, and in a guest of KVM no halted core does (it counts
 * as preempted).
 */

typedef struct {
    Code code;
    void *const *pointers;
    void *scratch;
    size_t private_bytes;
    int64_t trips, chunk;
    _Atomic int64_t next;
} Job;

typedef struct {
    pid_t id;
    _Atomic int core; /* where it was last seen, -1 if unknown */
    _Atomic int asleep; /* or woken, but not yet running */
    _Atomic int sent; /* from `home`, where it may be, to `given`, all of that but the caller's core */
    cpu_set_t home, given;
} Worker;

/* The state of the pool, one word so that a worker joins by one compare-and-swap: the number of the
 * job, seats left at it, workers that sit there. `job` is valid for whoever has a seat. */
#define JOB_BITS 32
#define ONE_JOB ((uint64_t)1 << JOB_BITS)
#define ONE_SEAT ((uint64_t)1 << 16)
#define RUNNING(state) ((state) & (ONE_SEAT - 1))
#define SEATS(state) ((state) % ONE_JOB / ONE_SEAT)
#define NUMBER(state) ((state) >> JOB_BITS)

static struct {
    pthread_mutex_t busy; /* held by the caller that uses the pool */
    pthread_mutex_t lock; /* held to fall asleep, to wake, and to send a worker away */
    pthread_cond_t wake, done;
    int workers;
    _Atomic int sleepers, caller_sleeps;
    _Atomic uint64_t state;
    Job *job;
    Worker threads[MAX_THREADS];
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void forget_pool(void)
{
    /* Only the forking thread lives on in a child: the parent's workers and locks do not. */
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = pool.sleepers = pool.caller_sleeps = 0;
    pool.state = 0;
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    for (int i = 0; i < 16; i++)
        __builtin_ia32_pause();
#endif
}

static void do_chunks(Job *job, void *scratch)
{
    for (;;) {
        int64_t begin = atomic_fetch_add(&job->next, job->chunk);
        if (begin >= job->trips)
            return;
        int64_t end = begin + job->chunk < job->trips ? begin + job->chunk : job->trips;
        job->code(job->pointers, scratch, begin, end);
    }
}

static void *aligned_memory(size_t bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, bytes >= HUGE_PAGE ? HUGE_PAGE : ALIGNMENT, bytes))
        return NULL;
    if (bytes >= HUGE_PAGE)
        madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static int competes(const Worker *each, int core) { return each->asleep || each->core == core; }

/* Send workers that would compete for the caller's core to others that both may use; how many. */
static int leave_core(void)
{
    int core = sched_getcpu(), rivals = 0, sent = 0;
    cpu_set_t ours;
    for (int i = 0; i < pool.workers; i++)
        rivals += competes(&pool.threads[i], core);
    if (core < 0 || rivals == 0 || sched_getaffinity(0, sizeof ours, &ours))
        return 0;
    CPU_CLR(core, &ours);
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < pool.workers; i++) {
        Worker *each = &pool.threads[i];
        if (each->sent || !competes(each, core)
            || sched_getaffinity(each->id, sizeof each->home, &each->home))
            continue;
        CPU_AND(&each->given, &each->home, &ours);
        each->sent = CPU_COUNT(&each->given)
            && !sched_setaffinity(each->id, sizeof each->given, &each->given);
        sent += each->sent;
    }
    pthread_mutex_unlock(&pool.lock);
    return sent;
}

/* A worker that was sent away has woken elsewhere, or the job is over: it may be where it could
 * before, unless somebody else has said otherwise meanwhile. None stays away between jobs, when an
 * affinity that a user sets could be the very one that it was given. */
static void arrive(Worker *each)
{
    cpu_set_t now;
    pthread_mutex_lock(&pool.lock);
    if (each->sent && !sched_getaffinity(each->id, sizeof now, &now)
        && CPU_EQUAL(&now, &each->given))
        sched_setaffinity(each->id, sizeof each->home, &each->home);
    each->sent = 0;
    pthread_mutex_unlock(&pool.lock);
}

/* A seat at a job that is not `seen`, which is then set to it; or NULL. */
static Job *take_seat(uint64_t *seen)
{
    uint64_t state = pool.state;
    while (SEATS(state) > 0 && NUMBER(state) != *seen)
        if (atomic_compare_exchange_weak(&pool.state, &state, state - ONE_SEAT + 1)) {
            *seen = NUMBER(state);
            return pool.job;
        }
    return NULL;
}

/* The next job: awaited for a while, then asleep. A caller announces its job before it looks for
 * sleepers, who count themselves before they look for a job: one of the two sees the other. */
static Job *next_job(Worker *self, uint64_t *seen)
{
    Job *job;
    int64_t last = nanoseconds() + SPIN_NANOSECONDS;
    while ((job = take_seat(seen)) == NULL && nanoseconds() < last)
        pause_briefly();
    if (job != NULL)
        return job;
    pthread_mutex_lock(&pool.lock);
    self->asleep = 1;
    pool.sleepers++;
    while ((job = take_seat(seen)) == NULL)
        pthread_cond_wait(&pool.wake, &pool.lock);
    pool.sleepers--;
    self->asleep = 0;
    pthread_mutex_unlock(&pool.lock);
    return job;
}

static void *worker(void *place)
{
    Worker *self = place;
    uint64_t seen = 0; /* number 0 is of no job */
    void *own = NULL; /* private scratch, kept for the next job */
    size_t own_bytes = 0;
    self->id = (pid_t)syscall(SYS_gettid);
    for (;;) {
        Job *job = next_job(self, &seen);
        if (self->sent)
            arrive(self);
        if (job->private_bytes > own_bytes) {
            free(own);
            own = aligned_memory(job->private_bytes);
            own_bytes = own == NULL ? 0 : job->private_bytes;
        }
        if (job->private_bytes <= own_bytes) /* else the others do its share */
            do_chunks(job, job->private_bytes ? own : job->scratch);
        self->core = sched_getcpu();
        uint64_t before = atomic_fetch_sub(&pool.state, 1);
        if (RUNNING(before) == 1 && pool.caller_sleeps) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return NULL;
}

static void grow_pool(int wanted)
{
    pthread_attr_t attributes;
    if (pool.workers >= wanted || pthread_attr_init(&attributes))
        return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; /* workers inherit the mask: signals stay with Python's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.workers < wanted) {
        Worker *place = &pool.threads[pool.workers];
        *place = (Worker){.core = -1};
        if (pthread_create(&thread, &attributes, worker, place))
            break;
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* Offer `seats` at a job, and wake as many workers as that if any sleep. */
static void announce(Job *job, int seats)
{
    uint64_t number = NUMBER(pool.state + ONE_JOB);
    pool.job = job;
    pool.state = (number ? number : 1) * ONE_JOB + (uint64_t)seats * ONE_SEAT;
    if (pool.sleepers == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    for (int i = 0; i < seats && i < pool.sleepers; i++)
        pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

/* Let nobody join the job any more, and wait for those who did. */
static void await_workers(void)
{
    atomic_fetch_and(&pool.state, ~(ONE_JOB - ONE_SEAT));
    int64_t last = nanoseconds() + SPIN_NANOSECONDS;
    while (RUNNING(pool.state) > 0 && nanoseconds() < last)
        pause_briefly();
    if (RUNNING(pool.state) == 0)
        return;
    pthread_mutex_lock(&pool.lock);
    pool.caller_sleeps = 1;
    while (RUNNING(pool.state) > 0)
        pthread_cond_wait(&pool.done, &pool.lock);
    pool.caller_sleeps = 0;
    pthread_mutex_unlock(&pool.lock);
}

static void run_shared(Stage *stage, void *const *pointers, void *scratch, int threads)
{
    if (threads < 2 || stage->trips < 2 || pthread_mutex_trylock(&pool.busy)) {
        stage->code(pointers, scratch, 0, stage->trips);
        return;
    }
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    if (threads > stage->trips)
        threads = (int)stage->trips;
    int64_t chunk = stage->trips / (4 * (int64_t)threads);
    Job job = {stage->code, pointers, scratch, stage->private_bytes,
               stage->trips, chunk > 0 ? chunk : 1, 0};
    grow_pool(threads - 1);
    int sent = leave_core();
    announce(&job, threads - 1);
    do_chunks(&job, scratch);
    await_workers();
    for (int i = 0; sent > 0 && i < pool.workers; i++)
        if (pool.threads[i].sent)
            arrive(&pool.threads[i]);
    pthread_mutex_unlock(&pool.busy);
}

/* ---- scratch: leased and given back with the GIL held ---- */

static void *lease(Entry *self)
{
    if (self->scratch_bytes == 0)
        return NULL;
    if (self->kept > 0)
        return self->scratch[--self->kept];
    void *memory = aligned_memory(self->scratch_bytes);
    if (memory == NULL)
        PyErr_NoMemory();
    return memory;
}

static void give_back(Entry *self, void *memory)
{
    if (memory == NULL)
        return;
    if (self->kept < KEPT_SCRATCH)
        self->scratch[self->kept++] = memory;
    else
        free(memory);
}

/* Run all stages over the arguments' addresses; no Python from here on. */
static void run(Entry *self, void **arguments, void *scratch, int threads)
{
    void *known[self->tensor_count + 1];
    void *table[self->most_operands + 1];
    for (int i = 0; i < self->tensor_count; i++) {
        Py_ssize_t offset = self->tensors[i].scratch_offset;
        known[i] = offset < 0 ? arguments[i] : (char *)scratch + offset;
    }
    for (int s = 0; s < self->stage_count; s++) {
        Stage *stage = &self->stages[s];
        for (int i = 0; i < stage->count; i++)
            table[i] = known[stage->tensors[i]];
        run_shared(stage, table, scratch, threads);
    }
}

/* ---- the fast call ---- */

static int fits(const Tensor *tensor, const Py_buffer *view)
{
    const char *format = view->format;
    if (format == NULL)
        return 0;
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    if (format[0] != tensor->format || format[1] != '\0' || view->ndim != tensor->ndim)
        return 0;
    if (view->suboffsets != NULL || (uintptr_t)view->buf % (uintptr_t)tensor->item)
        return 0;
    for (int d = 0; d < tensor->ndim; d++) {
        if (view->shape[d] != tensor->shape[d])
            return 0;
        if (tensor->shape[d] > 1 && !tensor->empty && view->strides[d] != tensor->strides[d])
            return 0;
    }
    return 1;
}

/* Whether the output's range of bytes meets an input's. */
static int overlaps(const Entry *self, void *const *pointers)
{
    const Tensor *out = &self->tensors[0];
    uintptr_t first = (uintptr_t)pointers[0] + (uintptr_t)out->low;
    uintptr_t last = (uintptr_t)pointers[0] + (uintptr_t)out->high;
    for (int i = 1; i < self->argument_count && !out->empty; i++) {
        const Tensor *in = &self->tensors[i];
        uintptr_t low = (uintptr_t)pointers[i] + (uintptr_t)in->low;
        uintptr_t high = (uintptr_t)pointers[i] + (uintptr_t)in->high;
        if (!in->empty && low < last && first < high)
            return 1;
    }
    return 0;
}

static PyObject *entry_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Entry *self = (Entry *)object;
    int inputs = self->argument_count - 1;
    if (kwargs == NULL || PyDict_Size(kwargs) != 1 || PyTuple_Size(args) != inputs)
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *out = PyDict_GetItemWithError(kwargs, out_name);
    if (out == NULL) {
        PyErr_Clear();
        Py_RETURN_NOTIMPLEMENTED;
    }
    Py_buffer views[self->argument_count];
    void *pointers[self->argument_count];
    int held = 0, good = 1;
    while (good && held < self->argument_count) {
        PyObject *argument = held == 0 ? out : PyTuple_GetItem(args, held - 1);
        /* NumPy's array is no heap type; its subclasses are, and may hide more than a buffer: a mask */
        if (PyType_GetFlags(Py_TYPE(argument)) & Py_TPFLAGS_HEAPTYPE) {
            good = 0;
            break;
        }
        int flags = held == 0 ? PyBUF_RECORDS : PyBUF_RECORDS_RO;
        if (PyObject_GetBuffer(argument, &views[held], flags)) {
            PyErr_Clear();
            good = 0;
            break;
        }
        pointers[held] = views[held].buf;
        good = fits(&self->tensors[held], &views[held]);
        held++;
    }
    good = good && !overlaps(self, pointers);
    void *scratch = NULL;
    if (good) {
        scratch = lease(self);
        if (scratch == NULL && self->scratch_bytes)
            good = -1;
    }
    if (good > 0) {
        Py_INCREF(out); /* another thread may empty the dictionary meanwhile */
        int threads = self->threads;
        PyThreadState *state = self->release_gil ? PyEval_SaveThread() : NULL;
        run(self, pointers, scratch, threads);
        if (state != NULL)
            PyEval_RestoreThread(state);
        give_back(self, scratch);
    }
    while (held-- > 0)
        PyBuffer_Release(&views[held]);
    if (good < 0)
        return NULL;
    if (good == 0)
        Py_RETURN_NOTIMPLEMENTED;
    return out;
}

/* ---- calls on addresses that Python has checked ---- */

static int addresses(Entry *self, PyObject *tuple, void **pointers)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != self->argument_count) {
        PyErr_Format(PyExc_TypeError, "a tuple of %d addresses is needed", self->argument_count);
        return -1;
    }
    for (int i = 0; i < self->argument_count; i++) {
        pointers[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
        if (pointers[i] == NULL && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static PyObject *entry_run_pointers(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pointers", "threads", NULL};
    Entry *self = (Entry *)object;
    PyObject *tuple;
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|i", names, &tuple, &threads))
        return NULL;
    void *pointers[self->argument_count];
    if (addresses(self, tuple, pointers))
        return NULL;
    void *scratch = lease(self);
    if (scratch == NULL && self->scratch_bytes)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    run(self, pointers, scratch, threads);
    Py_END_ALLOW_THREADS
    give_back(self, scratch);
    Py_RETURN_NONE;
}

static PyObject *entry_seconds(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"sets", "calls", "threads", NULL};
    Entry *self = (Entry *)object;
    PyObject *list;
    Py_ssize_t calls;
    int threads = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!n|i", names, &PyList_Type, &list, &calls,
                                     &threads))
        return NULL;
    Py_ssize_t sets = PyList_Size(list);
    if (sets < 1) {
        PyErr_SetString(PyExc_ValueError, "at least one set of addresses is needed");
        return NULL;
    }
    size_t width = (size_t)self->argument_count;
    void **pointers = calloc((size_t)sets, width * sizeof(void *));
    if (pointers == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t s = 0; s < sets; s++) {
        if (addresses(self, PyList_GetItem(list, s), pointers + (size_t)s * width)) {
            free(pointers);
            return NULL;
        }
    }
    void *scratch = lease(self);
    if (scratch == NULL && self->scratch_bytes) {
        free(pointers);
        return NULL;
    }
    struct timespec start, stop;
    Py_BEGIN_ALLOW_THREADS
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (Py_ssize_t call = 0, set = 0; call < calls; call++) {
        run(self, pointers + (size_t)set * width, scratch, threads);
        set = set + 1 == sets ? 0 : set + 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &stop);
    Py_END_ALLOW_THREADS
    give_back(self, scratch);
    free(pointers);
    double whole = (double)(stop.tv_sec - start.tv_sec);
    return PyFloat_FromDouble(whole + 1e-9 * (double)(stop.tv_nsec - start.tv_nsec));
}

static PyObject *call_address(PyObject *unused, PyObject *args)
{
    (void)unused;
    PyObject *numbers[2], *tuple;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(args, "OO!Onn", &numbers[0], &PyTuple_Type, &tuple, &numbers[1], &begin,
                          &end))
        return NULL;
    Py_ssize_t count = PyTuple_Size(tuple);
    void *address = PyLong_AsVoidPtr(numbers[0]);
    void *scratch = PyErr_Occurred() ? NULL : PyLong_AsVoidPtr(numbers[1]);
    if (PyErr_Occurred())
        return NULL;
    void **pointers = calloc((size_t)count + 1, sizeof(void *));
    if (pointers == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
        pointers[i] = PyLong_AsVoidPtr(PyTuple_GetItem(tuple, i));
    int good = !PyErr_Occurred();
    if (good) {
        Code code;
        memcpy(&code, &address, sizeof code);
        Py_BEGIN_ALLOW_THREADS
        code(pointers, scratch, begin, end);
        Py_END_ALLOW_THREADS
    }
    free(pointers);
    if (!good)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- construction ---- */

static int fill_numbers(PyObject *tuple, Py_ssize_t *numbers, Py_ssize_t count)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "a tuple of %zd numbers is needed", count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        numbers[i] = PyLong_AsSsize_t(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int fill_tensor(Tensor *tensor, PyObject *item)
{
    const char *format;
    PyObject *shape, *strides;
    if (!PyArg_ParseTuple(item, "sO!O!n", &format, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &tensor->scratch_offset))
        return -1;
    Py_ssize_t ndim = PyTuple_Size(shape);
    if (ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%zd dimensions; at most %d are supported", ndim, MAX_DIMS);
        return -1;
    }
    if (fill_numbers(shape, tensor->shape, ndim) || fill_numbers(strides, tensor->strides, ndim))
        return -1;
    /* 'Z' is bfloat16, for which buffers have no name: such arguments take the slow path. */
    const char *known = "fdeibZ", *found = strchr(known, *format);
    static const int sizes[] = {4, 8, 2, 4, 1, 2};
    if (*format == '\0' || format[1] != '\0' || found == NULL) {
        PyErr_Format(PyExc_ValueError, "format '%s'; one of '%s' would do", format, known);
        return -1;
    }
    tensor->format = *format;
    tensor->ndim = (int)ndim;
    tensor->item = sizes[found - known];
    tensor->low = 0;
    tensor->high = tensor->item;
    for (int d = 0; d < tensor->ndim; d++) {
        if (tensor->shape[d] == 0)
            tensor->empty = 1;
        Py_ssize_t reach = (tensor->shape[d] - 1) * tensor->strides[d];
        if (reach < 0)
            tensor->low += reach;
        else
            tensor->high += reach;
    }
    return 0;
}

static int fill_stage(Stage *stage, PyObject *item, int tensor_count)
{
    PyObject *address, *tensors;
    Py_ssize_t trips, private_bytes;
    if (!PyArg_ParseTuple(item, "OO!nn", &address, &PyTuple_Type, &tensors, &trips, &private_bytes))
        return -1;
    if (private_bytes < 0) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of private scratch", private_bytes);
        return -1;
    }
    void *code = PyLong_AsVoidPtr(address);
    if (code == NULL && PyErr_Occurred())
        return -1;
    Py_ssize_t count = PyTuple_Size(tensors);
    stage->tensors = calloc((size_t)count + 1, sizeof(int));
    if (stage->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(tensors, i));
        if (number < 0 || number >= tensor_count) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "a stage names tensor %ld of %d", number,
                             tensor_count);
            return -1;
        }
        stage->tensors[i] = (int)number;
    }
    memcpy(&stage->code, &code, sizeof code);
    stage->count = (int)count;
    stage->trips = trips;
    stage->private_bytes = (size_t)private_bytes;
    return 0;
}

/* Output and inputs come first, then temporaries, whose offsets lie in the scratch. */
static int fill_tensors(Entry *self, PyObject *tensors)
{
    self->tensors = calloc((size_t)PyTuple_Size(tensors) + 1, sizeof(Tensor));
    if (self->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->tensor_count = (int)PyTuple_Size(tensors);
    for (int i = 0; i < self->tensor_count; i++) {
        Tensor *tensor = &self->tensors[i];
        if (fill_tensor(tensor, PyTuple_GetItem(tensors, i)))
            return -1;
        if (tensor->scratch_offset < 0) {
            if (self->argument_count++ == i)
                continue;
            PyErr_SetString(PyExc_ValueError, "an argument comes behind a temporary");
            return -1;
        }
        Py_ssize_t size = tensor->empty ? 0 : tensor->high;
        if (tensor->scratch_offset > (Py_ssize_t)self->scratch_bytes - size) {
            PyErr_SetString(PyExc_ValueError, "a temporary lies outside the scratch");
            return -1;
        }
    }
    if (self->argument_count == 0) {
        PyErr_SetString(PyExc_ValueError, "the first tensor is the output; there is none");
        return -1;
    }
    return 0;
}

static int fill_stages(Entry *self, PyObject *stages)
{
    self->stages = calloc((size_t)PyTuple_Size(stages) + 1, sizeof(Stage));
    if (self->stages == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < (int)PyTuple_Size(stages); i++) {
        self->stage_count = i + 1;
        if (fill_stage(&self->stages[i], PyTuple_GetItem(stages, i), self->tensor_count))
            return -1;
        if (self->stages[i].count > self->most_operands)
            self->most_operands = self->stages[i].count;
    }
    return 0;
}

static void entry_dealloc(PyObject *object)
{
    Entry *self = (Entry *)object;
    for (int i = 0; self->stages != NULL && i < self->stage_count; i++)
        free(self->stages[i].tensors);
    free(self->stages);
    free(self->tensors);
    while (self->kept > 0)
        free(self->scratch[--self->kept]);
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *stages, *tensors, *name;
    Py_ssize_t scratch_bytes;
    int release_gil;
    static char *names[] = {"stages", "tensors", "scratch_bytes", "release_gil", "name", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!npO", names, &PyTuple_Type, &stages,
                                     &PyTuple_Type, &tensors, &scratch_bytes, &release_gil, &name))
        return NULL;
    if (scratch_bytes < 0 || scratch_bytes > PY_SSIZE_T_MAX - ALIGNMENT) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of scratch", scratch_bytes);
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Entry *self = (Entry *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->threads = 1;
    self->release_gil = release_gil;
    self->scratch_bytes = (size_t)((scratch_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (!fill_tensors(self, tensors) && !fill_stages(self, stages))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static PyObject *get_threads(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((Entry *)object)->threads);
}

static int set_threads(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    long threads = value == NULL ? -1 : PyLong_AsLong(value);
    if (threads < 1 || threads > MAX_THREADS) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "threads: 1 to %d would do", MAX_THREADS);
        return -1;
    }
    ((Entry *)object)->threads = (int)threads;
    return 0;
}

/* The detour over void (*)(void) is how C lets a function pointer change its type unwarned. */
#define WITH_KEYWORDS(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef entry_methods[] = {
    {"run_pointers", WITH_KEYWORDS(entry_run_pointers), METH_VARARGS | METH_KEYWORDS,
     "run_pointers(pointers, threads=1): run on the addresses of output and inputs."},
    {"seconds", WITH_KEYWORDS(entry_seconds), METH_VARARGS | METH_KEYWORDS,
     "seconds(sets, calls, threads=1): seconds for so many calls, in turn over sets of addresses."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef entry_getset[] = {
    {"threads", get_threads, set_threads, "Threads that a call uses.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_doc, "Entry(stages, tensors, scratch_bytes, release_gil, name): see the file's head."},
    {Py_tp_new, entry_new},
    {Py_tp_dealloc, entry_dealloc},
    {Py_tp_call, entry_call},
    {Py_tp_methods, entry_methods},
    {Py_tp_getset, entry_getset},
    {0, NULL},
};

static PyType_Spec entry_spec = {
    .name = "looptune.runtime._native.Entry",
    .basicsize = sizeof(Entry),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = entry_slots,
};

/* ---- what kernels inherit: a call that enters Python only when it must ---- */

typedef struct {
    PyObject_HEAD
    PyObject *entry; /* an Entry, or NULL */
} Caller;

static PyObject *caller_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Caller *self = (Caller *)object;
    if (self->entry != NULL) {
        PyObject *entry = self->entry;
        Py_INCREF(entry); /* another thread may bind a new one meanwhile */
        PyObject *result = entry_call(entry, args, kwargs);
        Py_DECREF(entry);
        if (result != Py_NotImplemented)
            return result;
        Py_DECREF(result);
    }
    PyObject *checked = PyObject_GetAttrString(object, "checked");
    if (checked == NULL)
        return NULL;
    PyObject *result = PyObject_Call(checked, args, kwargs);
    Py_DECREF(checked);
    return result;
}

static PyObject *caller_bind(PyObject *object, PyObject *entry)
{
    Caller *self = (Caller *)object;
    int good = PyObject_IsInstance(entry, entry_type);
    if (good < 0)
        return NULL;
    if (!good) {
        PyErr_SetString(PyExc_TypeError, "bind takes an Entry");
        return NULL;
    }
    PyObject *before = self->entry;
    Py_INCREF(entry);
    self->entry = entry;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static void caller_dealloc(PyObject *object)
{
    Py_XDECREF(((Caller *)object)->entry);
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef caller_methods[] = {
    {"bind", caller_bind, METH_O, "bind(entry): calls go to this Entry first, then to checked()."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot caller_slots[] = {
    {Py_tp_doc, "A base class whose instances are called through an Entry."},
    {Py_tp_dealloc, caller_dealloc},
    {Py_tp_call, caller_call},
    {Py_tp_methods, caller_methods},
    {0, NULL},
};

static PyType_Spec caller_spec = {
    .name = "looptune.runtime._native.Caller",
    .basicsize = sizeof(Caller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = caller_slots,
};

static PyMethodDef functions[] = {
    {"call_address", call_address, METH_VARARGS,
     "call_address(address, pointers, scratch, begin, end): one call of machine code, unchecked."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Calls to generated code.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL)
        return NULL;
    out_name = PyUnicode_InternFromString("out");
    entry_type = PyType_FromSpec(&entry_spec); /* kept for bind, as the name is for calls */
    PyObject *caller = PyType_FromSpec(&caller_spec);
    int good = out_name != NULL && entry_type != NULL && caller != NULL;
    good = good && !PyModule_AddObjectRef(self, "Entry", entry_type);
    good = good && !PyModule_AddObjectRef(self, "Caller", caller);
    if (good && pthread_atfork(NULL, NULL, forget_pool)) {
        PyErr_NoMemory();
        good = 0;
    }
    Py_XDECREF(caller);
    if (good)
        return self;
    Py_DECREF(self);
    return NULL;
}
