/* Streams, events and graphs of the stub: what is queued runs in order, on whichever call of the driver comes next, as far as nothing waits.
 * Never waits: a call that would wait for a gate which only its own caller can open fails with an error of its own. Surprising fact: without a
 * thread the order is the same each time, and a wait without an end is seen at once. */

/* CUDA_ERROR_NOT_READY, and "the launch timed out" for what would wait for ever. */
enum { NOT_READY = 600, FOR_EVER = 702, PARAMS_MAX = 24, BLOCK_BYTES = 384 };

struct event {
    uint64_t time;
    /* How often it was recorded, and how many of these have come. */
    long asked, come;
    /* The recording that it was recorded in, if any. */
    long recording;
};

enum kind { KERNEL, CLEAR, COPY, RECORD, WAIT };

struct op {
    enum kind kind;
    struct op *next;
    /* Of a kernel. */
    char name[48];
    unsigned grid;
    uint64_t params[PARAMS_MAX];
    unsigned char block[BLOCK_BYTES];
    /* Of memory. */
    void *to;
    const void *from;
    size_t bytes;
    int value;
    struct event *event;
    long nth;
};

struct line {
    struct op *first, **end;
    struct line *next;
    /* The recording that its ops go to. */
    long recording;
    /* Whether something was queued since somebody asked for it, or waited. */
    int is_busy;
};

struct graph {
    struct op *first, **end;
};

static struct line *lines;
static struct graph recorded;
/* The number of the recording under way, or 0; and how many there were. */
static long recording, recordings;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static void run_kernel(const struct op *op);
static int may_run(const struct op *op);

static struct line *new_line(void);

/* That of the stream without a name is made when it is needed. */
static struct line *line_of(void *stream) {
    static struct line *nameless;
    if (stream) return stream;
    return nameless ? nameless : (nameless = new_line());
}

static void append(struct op ***end, struct op *op) {
    op->next = 0;
    **end = op;
    *end = &op->next;
}

static struct op *copy_of(const struct op *op) {
    struct op *copy = malloc(sizeof *copy);
    *copy = *op;
    return copy;
}

static void drop_ops(struct op *op) {
    while (op) {
        struct op *next = op->next;
        free(op);
        op = next;
    }
}

static void run(struct op *op) {
    switch (op->kind) {
    case KERNEL: run_kernel(op); break;
    case CLEAR: memset(op->to, op->value, op->bytes); break;
    case COPY: memcpy(op->to, op->from, op->bytes); break;
    case RECORD: op->event->time = now(); op->event->come = op->nth; break;
    case WAIT: break;
    }
}

/* Runs what can run. */
static void advance(void) {
    for (int any = 1; any && !lost;) {
        any = 0;
        for (struct line *line = lines; line; line = line->next) {
            struct op *op;
            while ((op = line->first) && !lost && (op->kind == WAIT ? op->event->come >= op->nth : op->kind != KERNEL || may_run(op))) {
                line->first = op->next;
                if (!line->first) line->end = &line->first;
                op->next = 0;
                run(op);
                drop_ops(op);
                any = 1;
            }
        }
    }
}

/* Queues `op`, or records it. */
static void queue(void *stream, struct op op) {
    struct line *line = line_of(stream);
    int is_recorded = recording && line->recording == recording;
    append(is_recorded ? &recorded.end : &line->end, copy_of(&op));
    if (is_recorded) return;
    line->is_busy = 1;
    advance();
}

/* A wait that has no end; as bad as a lost device, so that nobody overlooks it. */
static int for_ever(void) {
    return lost = FOR_EVER;
}

/* What a call returns that waits for `stream`, or for all of them. */
static int wait_for(void *stream, int all) {
    advance();
    for (struct line *line = lines; line && !lost; line = line->next) {
        if ((all || line == line_of(stream)) && line->first) return for_ever();
    }
    return lost;
}

static struct line *new_line(void) {
    struct line *line = calloc(1, sizeof *line);
    line->end = &line->first;
    line->next = lines;
    return lines = line;
}

static void record(struct event *event, struct line *line) {
    int is_recorded = recording && line->recording == recording;
    event->recording = is_recorded ? recording : 0;
    if (!is_recorded) queue(line, (struct op){.kind = RECORD, .event = event, .nth = ++event->asked});
}

static int let_wait(struct line *line, struct event *event) {
    if (recording && event->recording == recording) {
        line->recording = recording;
        return 0;
    }
    /* A recording waits for nothing outside of it. */
    if (recording && line->recording == recording) return 905;
    queue(line, (struct op){.kind = WAIT, .event = event, .nth = event->asked});
    return 0;
}

static void refill(struct graph *graph, const struct op *op) {
    drop_ops(graph->first);
    graph->first = 0;
    graph->end = &graph->first;
    for (; op; op = op->next) append(&graph->end, copy_of(op));
}

static struct graph *graph_of(const struct op *op) {
    struct graph *graph = calloc(1, sizeof *graph);
    refill(graph, op);
    return graph;
}

static void begin_recording(struct line *line) {
    line->recording = recording = ++recordings;
    refill(&recorded, 0);
}

static struct graph *end_recording(void) {
    recording = 0;
    return graph_of(recorded.first);
}

static void play(const struct graph *form, struct line *line) {
    for (const struct op *op = form->first; op; op = op->next) append(&line->end, copy_of(op));
    line->is_busy = 1;
    advance();
}

/* Host memory that copies reach by themselves. */
enum { PINNED_MAX = 4096 };
static struct { const char *start, *end; } pinned[PINNED_MAX];

static void pin(const void *at, size_t bytes) {
    for (int i = 0; i < PINNED_MAX; i++) {
        if (!pinned[i].start) {
            pinned[i].start = at;
            pinned[i].end = (const char *)at + bytes;
            return;
        }
    }
    abort();
}

static void unpin(const void *at) {
    for (int i = 0; i < PINNED_MAX; i++) {
        if (pinned[i].start == at) pinned[i].start = pinned[i].end = 0;
    }
}

/* Queues a copy whose end `host` is memory of the host, if any is: what the driver does not know, it copies before the call returns. */
static int copy(void *to, const void *from, size_t bytes, const void *host, void *stream) {
    struct line *line = line_of(stream);
    int is_known = !host;
    for (int i = 0; i < PINNED_MAX && !is_known; i++) is_known = pinned[i].start && pinned[i].start <= (const char *)host && (const char *)host + bytes <= pinned[i].end;
    if (!is_known && recording && line->recording == recording) return for_ever();
    queue(stream, (struct op){.kind = COPY, .to = to, .from = from, .bytes = bytes});
    return is_known ? 0 : wait_for(stream, 0);
}
