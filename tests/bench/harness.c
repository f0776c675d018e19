/* Both ends of a router under test in one process: two stub engines and the load client.
 *
 * One process means one clock for both ends, and that a stub can see what its client holds: in mode
 * `lock` chunk k+1 of a stream leaves only when the client has chunk k, so nothing can coalesce and
 * each chunk is one wake-up, one read and one write of the router.
 *
 * Every reply is checked: status, the request's number, chunks in order and complete.
 *
 *   harness                prints {"ports":[A,B]}, then serves commands from standard input:
 *   run mode=M port=P ...  prints {"event":"begin"} when warm, then one line of results.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PROMPT_BYTES = 1000, MAX_CONNS = 2048, MAX_STUBS = 8192, SAMPLES = 1 << 20, EVENTS = 256, MAX_PIDS = 64 };
enum mode { PLAIN, STREAM, LOCK };
enum kind { LISTENER, STUB, CLIENT, COMMANDS };

typedef struct { char *data; size_t start, end, size; } Buffer;

typedef struct Conn {
    enum kind kind;
    int fd;
    bool wants_write, streaming, busy, head_done, chunked, done;
    unsigned generation;          /* of the stub's request: outdates timers */
    int slot;                     /* of the client */
    long long seq;                /* number of the request */
    long next_chunk;              /* stub: to send; client: expected */
    int64_t sent_at, last_chunk_at;
    long long body_left;          /* of a reply with content-length, or of the current HTTP chunk */
    int chunk_state;              /* 0 size line, 1 data, 2 its CRLF, 3 trailer */
    struct Conn *peer;            /* client: the stub connection that serves it */
    Buffer in, out, body;
} Conn;

typedef struct { int64_t due; Conn *conn; unsigned generation; } Timer;
typedef struct { Timer *items; size_t head, count; } Queue;   /* constant delays: first in, first due */
typedef struct { double *values; size_t count; } Series;

static struct {
    enum mode mode;
    int port, conns;
    double seconds, warm_s;
    long tokens;
    int64_t ttft_ns, itl_ns;
    int core, pids[MAX_PIDS], pid_count;
} plan;

static int epoll_fd;
static bool running, measuring;
static int64_t begin_at, end_at;
static long router_ticks, core_ticks;    /* at the start of the window */
static long long next_seq, requests, chunks, errors, reconnects;
static Conn *clients[MAX_CONNS], *stubs[MAX_STUBS];
static int stub_count;
static Queue first_queue, next_queue;
static Series first_us, chunk_us, reply_us;
static char prompt[PROMPT_BYTES + 1];

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void fail(const char *what) { perror(what); exit(1); }

static void *need(void *memory) { if (!memory) fail("memory"); return memory; }

static char *room(Buffer *b, size_t extra) {
    if (b->start) {
        memmove(b->data, b->data + b->start, b->end - b->start);
        b->end -= b->start;
        b->start = 0;
    }
    if (b->size - b->end < extra) b->data = need(realloc(b->data, b->size = b->end + extra + 4096));
    return b->data + b->end;
}

static void append(Buffer *b, const char *data, size_t length) {
    memcpy(room(b, length), data, length);
    b->end += length;
}

static void record(Series *s, double value) { if (s->count < SAMPLES) s->values[s->count++] = value; }

/* ---- connections */

static void watch(Conn *c, bool write) {
    struct epoll_event e = {.events = EPOLLIN | (write ? EPOLLOUT : 0), .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e)) fail("epoll_ctl");
    c->wants_write = write;
}

static void watch_new(Conn *c) {
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e)) fail("epoll_ctl");
}

static void no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void drop(Conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
    c->in.start = c->in.end = c->out.start = c->out.end = c->body.start = c->body.end = 0;
    c->busy = c->streaming = c->wants_write = false;
    c->peer = NULL;
    c->generation++;
}

static void flush(Conn *c) {
    while (c->out.start < c->out.end) {
        ssize_t n = send(c->fd, c->out.data + c->out.start, c->out.end - c->out.start, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) return;          /* the reading side sees the end of the connection */
        c->out.start += n;
    }
    bool rest = c->out.start < c->out.end;
    if (!rest) c->out.start = c->out.end = 0;
    if (rest != c->wants_write) watch(c, rest);
}

static void send_all(Conn *c, const char *data, size_t length) {
    append(&c->out, data, length);
    flush(c);
}

/* 1: data, 0: nothing now, -1: closed */
static int receive(Conn *c) {
    ssize_t n = recv(c->fd, room(&c->in, 65536), 65536, 0);
    if (n > 0) { c->in.end += n; return 1; }
    return n < 0 && errno == EAGAIN ? 0 : -1;
}

static bool header(const char *head, size_t length, const char *name, char *value, size_t size) {
    size_t name_length = strlen(name);
    for (const char *line = head, *end = head + length; line < end;) {
        const char *stop = memchr(line, '\n', end - line);
        if (!stop) return false;
        if ((size_t)(stop - line) > name_length && line[name_length] == ':' && !strncasecmp(line, name, name_length)) {
            const char *v = line + name_length + 1;
            while (*v == ' ') v++;
            size_t n = 0;
            while (v < stop && *v != '\r' && n + 1 < size) value[n++] = *v++;
            value[n] = 0;
            return true;
        }
        line = stop + 1;
    }
    return false;
}

/* ---- timers */

static void later(Queue *q, int64_t delay_ns, Conn *c) {
    if (q->count == MAX_STUBS) { errors++; return; }
    q->items[(q->head + q->count++) % MAX_STUBS] = (Timer){now_ns() + delay_ns, c, c->generation};
}

/* ---- stub engine */

static void stub_chunk(Conn *c) {
    char event[320], frame[400];
    bool last = c->next_chunk + 1 >= plan.tokens;
    int n = snprintf(event, sizeof event,
        "data: {\"id\":\"chatcmpl-5f0c1b2a9d3e4f60\",\"object\":\"chat.completion.chunk\",\"created\":1764518400,"
        "\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@%lld/%ld/%lld;\"},\"logprobs\":null,"
        "\"finish_reason\":%s}]}\n\n", c->seq, c->next_chunk, (long long)now_ns(), last ? "\"stop\"" : "null");
    int m = snprintf(frame, sizeof frame, "%x\r\n%s\r\n", n, event);
    c->next_chunk++;
    send_all(c, frame, m);
    if (!last) return;
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    c->streaming = false;
    c->generation++;
    send_all(c, end, sizeof end - 1);
}

static void stub_json(Conn *c, const char *body) {
    char reply[2048];
    int n = snprintf(reply, sizeof reply,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body), body);
    send_all(c, reply, n);
}

static void stub_completion(Conn *c, const char *body, size_t length) {
    const char *mark = memmem(body, length, "slot=", 5);
    int slot = -1;
    long long seq = -1;
    if (mark) sscanf(mark, "slot=%d seq=%lld", &slot, &seq);
    c->seq = seq;
    if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
        static const char head[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                   "transfer-encoding: chunked\r\n\r\n";
        c->streaming = true;
        c->next_chunk = 0;
        c->generation++;
        if (running && slot >= 0 && slot < plan.conns && clients[slot]->seq == seq) clients[slot]->peer = c;
        send_all(c, head, sizeof head - 1);
        if (plan.ttft_ns) later(&first_queue, plan.ttft_ns, c);
        else stub_chunk(c);
        return;
    }
    char reply[700];
    snprintf(reply, sizeof reply,
        "{\"id\":\"chatcmpl-%lld\",\"object\":\"chat.completion\",\"created\":1764518400,\"model\":\"m\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"%.130s\",\"tool_calls\":null},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
        "\"usage\":{\"prompt_tokens\":230,\"completion_tokens\":32,\"total_tokens\":262}}", seq, prompt);
    stub_json(c, reply);
}

static void stub_request(Conn *c, const char *path, size_t path_length, const char *body, size_t length) {
    if (path_length >= 11 && !memcmp(path + path_length - 11, "completions", 11)) stub_completion(c, body, length);
    else if (path_length >= 10 && !memcmp(path, "/v1/models", 10))
        stub_json(c, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1764518400,\"owned_by\":\"sglang\","
                     "\"root\":\"m\",\"max_model_len\":8192}]}");
    else if (path_length >= 9 && !memcmp(path, "/v1/loads", 9))
        stub_json(c, "{\"loads\":[{\"dp_rank\":0,\"num_running_reqs\":0,\"num_waiting_reqs\":0}]}");
    else
        stub_json(c, "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"tokenizer_path\":\"m\",\"is_generation\":true,"
                     "\"version\":\"0.5.12.post1\",\"context_length\":8192,\"dtype\":\"bfloat16\",\"tp_size\":1,\"dp_size\":1,"
                     "\"max_running_requests\":2048,\"max_total_num_tokens\":1000000,\"internal_states\":[{}]}");
}

static void stub_input(Conn *c) {
    int got = receive(c);
    if (got < 0) { drop(c); return; }
    while (got > 0 && !c->streaming && c->fd >= 0) {
        char *start = c->in.data + c->in.start, value[32];
        size_t have = c->in.end - c->in.start;
        char *end = memmem(start, have, "\r\n\r\n", 4);
        if (!end) return;
        size_t head = end - start + 4, body = 0, total;
        if (header(start, head, "content-length", value, sizeof value)) {
            body = strtoul(value, NULL, 10);
            total = head + body;
        } else if (header(start, head, "transfer-encoding", value, sizeof value)) {
            char *stop = memmem(start + head, have - head, "\r\n0\r\n\r\n", 7);
            if (!stop) return;
            total = stop + 7 - start;
            body = total - head;
        } else total = head;
        if (have < total) return;
        char *path = memchr(start, ' ', head);
        char *after = path ? memchr(path + 1, ' ', head - (path + 1 - start)) : NULL;
        if (!after) { drop(c); return; }
        stub_request(c, path + 1, after - path - 1, start + head, body);
        c->in.start += total;
    }
}

/* ---- client */

static void client_send(Conn *c) {
    char body[PROMPT_BYTES + 400], head[400];
    c->seq = ++next_seq;
    c->busy = true;
    c->head_done = c->done = false;
    c->next_chunk = c->chunk_state = 0;
    c->peer = NULL;
    c->body.start = c->body.end = 0;
    int n = snprintf(body, sizeof body,
        "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},"
        "{\"role\":\"user\",\"content\":\"slot=%d seq=%lld %s\"}],\"max_tokens\":256,\"temperature\":0.7,\"stream\":%s}",
        c->slot, c->seq, prompt, plan.mode == PLAIN ? "false" : "true");
    int m = snprintf(head, sizeof head,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: OpenAI/Python 3.5.7\r\naccept: application/json\r\n"
        "content-type: application/json\r\ncontent-length: %d\r\n\r\n", plan.port, n);
    append(&c->out, head, m);
    c->sent_at = now_ns();
    send_all(c, body, n);
}

static void client_connect(Conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(plan.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&to, sizeof to)) fail("connect to the router");
    no_delay(c->fd);
    if (fcntl(c->fd, F_SETFL, O_NONBLOCK)) fail("fcntl");
    watch_new(c);
}

static void client_next(Conn *c, bool keep) {
    int64_t t = now_ns();
    c->busy = false;
    if (measuring && t < end_at) {
        requests++;
        if (plan.mode == PLAIN && c->sent_at >= begin_at) record(&reply_us, (t - c->sent_at) / 1e3);
    }
    if (!keep) {
        drop(c);
        reconnects++;
        client_connect(c);
    }
    client_send(c);
}

/* One SSE event. */
static void client_event(Conn *c, const char *event, size_t length) {
    if (length >= 12 && !memcmp(event, "data: [DONE]", 12)) { c->done = true; return; }
    const char *mark = memchr(event, '@', length);
    long long seq, sent;
    long k;
    if (!mark || sscanf(mark, "@%lld/%ld/%lld;", &seq, &k, &sent) != 3 || seq != c->seq || k != c->next_chunk) {
        errors++;
        return;
    }
    int64_t t = now_ns();
    c->next_chunk++;
    if (measuring && t < end_at) {
        chunks++;
        record(k ? &chunk_us : &first_us, (t - sent) / 1e3);
    }
    if (plan.mode == LOCK && c->peer && c->peer->streaming) stub_chunk(c->peer);
}

static void client_body(Conn *c, const char *data, size_t length) {
    append(&c->body, data, length);
    if (plan.mode == PLAIN) return;
    for (;;) {
        char *start = c->body.data + c->body.start;
        char *end = memmem(start, c->body.end - c->body.start, "\n\n", 2);
        if (!end) return;
        c->body.start += end + 2 - start;
        client_event(c, start, end - start);
    }
}

static void client_finished(Conn *c, bool keep) {
    if (plan.mode == PLAIN) {
        char wanted[64];
        int n = snprintf(wanted, sizeof wanted, "{\"id\":\"chatcmpl-%lld\",", c->seq);
        size_t have = c->body.end - c->body.start;
        char *body = c->body.data + c->body.start;
        if (have < 300 || memcmp(body, wanted, n) || memcmp(body + have - 2, "}}", 2)) errors++;
    } else if (!c->done || c->next_chunk != plan.tokens) errors++;
    client_next(c, keep);
}

/* Returns false while the head is incomplete. */
static bool client_head(Conn *c, bool *keep) {
    char *start = c->in.data + c->in.start, value[32];
    char *end = memmem(start, c->in.end - c->in.start, "\r\n\r\n", 4);
    if (!end) return false;
    size_t head = end - start + 4;
    if (atoi(start + 9) != 200) errors++;
    c->head_done = true;
    c->chunked = false;
    c->body_left = 0;
    *keep = !(header(start, head, "connection", value, sizeof value) && !strcasecmp(value, "close"));
    if (header(start, head, "content-length", value, sizeof value)) c->body_left = strtoll(value, NULL, 10);
    else c->chunked = true;
    c->in.start += head;
    return true;
}

/* Consumes what it can of a chunked body; true at its end. */
static bool client_dechunk(Conn *c) {
    for (;;) {
        char *start = c->in.data + c->in.start;
        size_t have = c->in.end - c->in.start;
        if (c->chunk_state == 1) {
            size_t n = have < (size_t)c->body_left ? have : (size_t)c->body_left;
            if (!n) return false;
            c->in.start += n;
            c->body_left -= n;
            if (!c->body_left) c->chunk_state = 2;
            client_body(c, start, n);
            continue;
        }
        char *line = memmem(start, have, "\r\n", 2);
        if (!line) return false;
        c->in.start += line + 2 - start;
        if (c->chunk_state == 3) return true;
        if (c->chunk_state == 2) { c->chunk_state = 0; continue; }
        c->body_left = strtoll(start, NULL, 16);
        c->chunk_state = c->body_left ? 1 : 3;
    }
}

static void client_input(Conn *c) {
    int got = receive(c);
    if (got == 0) return;
    if (got < 0) {
        if (c->busy) errors++;
        drop(c);
        reconnects++;
        client_connect(c);
        client_send(c);
        return;
    }
    bool keep = true;
    if (!c->busy || (!c->head_done && !client_head(c, &keep))) return;
    if (c->chunked) {
        if (client_dechunk(c)) client_finished(c, keep);
        return;
    }
    size_t n = c->in.end - c->in.start;
    client_body(c, c->in.data + c->in.start, n);
    c->in.start = c->in.end = 0;
    c->body_left -= n;
    if (c->body_left <= 0) client_finished(c, keep);
}

/* ---- what the kernel counts, read here because another process would read it late */

static bool slurp(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, size - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

/* User and system time of the router's processes, in ticks. */
static long ticks_of_router(void) {
    long total = 0;
    for (int i = 0; i < plan.pid_count; i++) {
        char path[64], text[1024];
        unsigned long user, system;
        snprintf(path, sizeof path, "/proc/%d/stat", plan.pids[i]);
        if (!slurp(path, text, sizeof text)) continue;
        char *after = strrchr(text, ')');
        if (after && sscanf(after + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) == 2)
            total += user + system;
    }
    return total;
}

/* Time that the router's core has not been idle, in ticks. */
static long ticks_of_core(void) {
    static char text[1 << 16];
    char name[16];
    unsigned long user, nice, system, idle, wait, irq, soft;
    snprintf(name, sizeof name, "cpu%d ", plan.core);
    if (!slurp("/proc/stat", text, sizeof text)) return 0;
    char *line = strstr(text, name);
    if (!line || sscanf(line, "%*s %lu %lu %lu %lu %lu %lu %lu", &user, &nice, &system, &idle, &wait, &irq, &soft) != 7) return 0;
    return user + nice + system + irq + soft;
}

/* ---- a run */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_series(const char *name, Series *s) {
    if (!s->count) { printf(",\"%s\":null", name); return; }
    qsort(s->values, s->count, sizeof *s->values, by_value);
    printf(",\"%s\":{\"n\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f}", name, s->count, s->values[s->count / 2],
           s->values[s->count * 9 / 10], s->values[s->count * 99 / 100]);
}

static void start_run(char *line) {
    memset(&plan, 0, sizeof plan);
    plan.tokens = 1;
    plan.seconds = 2;
    for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(word, "mode")) plan.mode = !strcmp(value, "plain") ? PLAIN : !strcmp(value, "lock") ? LOCK : STREAM;
        else if (!strcmp(word, "port")) plan.port = atoi(value);
        else if (!strcmp(word, "conns")) plan.conns = atoi(value) < MAX_CONNS ? atoi(value) : MAX_CONNS;
        else if (!strcmp(word, "seconds")) plan.seconds = atof(value);
        else if (!strcmp(word, "warm")) plan.warm_s = atof(value);
        else if (!strcmp(word, "tokens")) plan.tokens = atol(value);
        else if (!strcmp(word, "core")) plan.core = atoi(value);
        else if (!strcmp(word, "pids"))
            for (char *pid = value; *pid && plan.pid_count < MAX_PIDS; pid += *pid == ',')
                plan.pids[plan.pid_count++] = strtol(pid, &pid, 10);
        else if (!strcmp(word, "ttft_ms")) plan.ttft_ns = (int64_t)(atof(value) * 1e6);
        else if (!strcmp(word, "itl_ms")) plan.itl_ns = (int64_t)(atof(value) * 1e6);
    }
    requests = chunks = errors = reconnects = 0;
    first_us.count = chunk_us.count = reply_us.count = first_queue.count = next_queue.count = 0;
    running = true;
    measuring = false;
    begin_at = now_ns() + (int64_t)(plan.warm_s * 1e9);
    for (int i = 0; i < plan.conns; i++) {
        Conn *c = clients[i] = need(calloc(1, sizeof(Conn)));
        c->kind = CLIENT;
        c->slot = i;
    }
    for (int i = 0; i < plan.conns; i++) {
        client_connect(clients[i]);
        client_send(clients[i]);
    }
}

static void free_conn(Conn *c) {
    free(c->in.data);
    free(c->out.data);
    free(c->body.data);
    free(c);
}

static void finish_run(void) {
    double wall_ms = (now_ns() - begin_at) / 1e6, tick_ms = 1e3 / sysconf(_SC_CLK_TCK);
    double cpu_ms = (ticks_of_router() - router_ticks) * tick_ms, busy_ms = (ticks_of_core() - core_ticks) * tick_ms;
    running = measuring = false;
    printf("{\"event\":\"end\",\"wall_ms\":%.1f,\"cpu_ms\":%.0f,\"core_busy_ms\":%.0f,\"requests\":%lld,\"chunks\":%lld,\"errors\":%lld,\"reconnects\":%lld", wall_ms, cpu_ms,
           busy_ms, requests, chunks, errors, reconnects);
    print_series("first_us", &first_us);
    print_series("chunk_us", &chunk_us);
    print_series("reply_us", &reply_us);
    printf("}\n");
    fflush(stdout);
    for (int i = 0; i < plan.conns; i++) {
        drop(clients[i]);
        free_conn(clients[i]);
    }
    plan.conns = 0;
    first_queue.count = next_queue.count = 0;
    for (int i = stub_count - 1; i >= 0; i--) {
        if (stubs[i]->streaming) drop(stubs[i]);
        if (stubs[i]->fd >= 0) continue;
        free_conn(stubs[i]);
        stubs[i] = stubs[--stub_count];
    }
}

static int listen_on_any_port(Conn *c) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    c->kind = LISTENER;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(c->fd, (void *)&at, length) || listen(c->fd, 4096) || getsockname(c->fd, (void *)&at, &length)) fail("listen");
    watch_new(c);
    return ntohs(at.sin_port);
}

static void accept_all(Conn *listener) {
    int fd;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (stub_count == MAX_STUBS) { close(fd); errors++; continue; }
        Conn *c = stubs[stub_count++] = need(calloc(1, sizeof(Conn)));
        c->kind = STUB;
        c->fd = fd;
        no_delay(fd);
        watch_new(c);
    }
}

static void read_command(void) {
    static char line[1024];
    if (!fgets(line, sizeof line, stdin)) exit(0);
    if (!strncmp(line, "run ", 4)) start_run(line + 4);
}

static void handle(struct epoll_event *e) {
    Conn *c = e->data.ptr;
    if (c->kind == LISTENER) { accept_all(c); return; }
    if (c->kind == COMMANDS) { read_command(); return; }
    if (c->fd < 0) return;
    if (e->events & EPOLLOUT) flush(c);
    if (c->fd < 0 || !(e->events & ~EPOLLOUT)) return;
    if (c->kind == STUB) stub_input(c);
    else client_input(c);
}

static void run_timers(Queue *q, int64_t t) {
    while (q->count && q->items[q->head].due <= t) {
        Timer timer = q->items[q->head];
        q->head = (q->head + 1) % MAX_STUBS;
        q->count--;
        if (timer.generation != timer.conn->generation || timer.conn->fd < 0) continue;
        stub_chunk(timer.conn);
        if (timer.conn->streaming && plan.mode == STREAM) later(&next_queue, plan.itl_ns, timer.conn);
    }
}

static int64_t earliest(int64_t a, int64_t b) { return a < b ? a : b; }

int main(void) {
    static Conn listeners[2], commands = {.kind = COMMANDS, .fd = 0};
    static struct epoll_event events[EVENTS];
    epoll_fd = epoll_create1(0);
    for (int i = 0; i < PROMPT_BYTES; i++) prompt[i] = "the quick brown fox jumps over a lazy dog "[i % 42];
    first_us.values = need(malloc(SAMPLES * sizeof(double)));
    chunk_us.values = need(malloc(SAMPLES * sizeof(double)));
    reply_us.values = need(malloc(SAMPLES * sizeof(double)));
    first_queue.items = need(calloc(MAX_STUBS, sizeof(Timer)));
    next_queue.items = need(calloc(MAX_STUBS, sizeof(Timer)));
    setvbuf(stdin, NULL, _IONBF, 0);
    int a = listen_on_any_port(&listeners[0]), b = listen_on_any_port(&listeners[1]);
    watch_new(&commands);
    printf("{\"ports\":[%d,%d]}\n", a, b);
    fflush(stdout);
    for (;;) {
        int64_t t = now_ns(), due = INT64_MAX;
        if (running) due = measuring ? end_at : begin_at;
        if (first_queue.count) due = earliest(due, first_queue.items[first_queue.head].due);
        if (next_queue.count) due = earliest(due, next_queue.items[next_queue.head].due);
        int64_t wait = due == INT64_MAX ? 0 : due > t ? due - t : 0;
        struct timespec timeout = {wait / 1000000000, wait % 1000000000};
        int n = epoll_pwait2(epoll_fd, events, EVENTS, due == INT64_MAX ? NULL : &timeout, NULL);
        for (int i = 0; i < n; i++) handle(&events[i]);
        t = now_ns();
        run_timers(&first_queue, t);
        run_timers(&next_queue, t);
        if (running && !measuring && t >= begin_at) {
            measuring = true;
            router_ticks = ticks_of_router();
            core_ticks = ticks_of_core();
            begin_at = t = now_ns();
            end_at = t + (int64_t)(plan.seconds * 1e9);
            errors = 0;
            printf("{\"event\":\"begin\"}\n");
            fflush(stdout);
        } else if (running && measuring && t >= end_at) finish_run();
    }
}
