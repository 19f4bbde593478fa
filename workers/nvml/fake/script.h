/* The script of the fake NVML: its cards, what they say when, and how it is read. Included once, by fake_nvml.c.
 *
 * The text is written by `workers/nvml/fake/script.py`, which checks what a person wrote; a line that is not understood
 * here is a difference between the two files.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>

/* The first four are checked by `script.py`, for a better message. */
enum {
    MAX_CARDS = 16, MAX_POINTS = 256, MAX_PROCESSES = 64, MAX_MISSING = 64, MAX_NAME = 96, MAX_LINE = 16384,
    MAX_PATH = 4096
};

/* The keys of a card in the script; the last two are nothing that is asked for, and can only fail. */
#define QUESTIONS(X) \
    X(total_bytes) X(used_bytes) X(reserved_bytes) X(compute_capability) X(temperature_c) X(slowdown_c) X(margin_c) \
    X(slowdown_tlimit_c) X(memory_temperature_c) X(power_w) X(power_average_w) X(power_limit_w) \
    X(power_limit_default_w) X(power_limit_min_w) X(power_limit_max_w) X(sm_clock_mhz) X(sm_clock_max_mhz) \
    X(memory_clock_mhz) X(utilisation_pct) X(throttle) X(fan_pct) X(pcie_generation) X(pcie_lanes) X(ecc_enabled) \
    X(ecc_errors) X(remapped_rows) X(persistence_mode) X(compute_mode) X(memory_offset_mhz) \
    X(memory_offset_min_mhz) X(memory_offset_max_mhz) X(processes) X(xids) X(set_power_limit) X(set_memory_offset)
#define AS_ENUM(name) Q_##name,
#define AS_TEXT(name) #name,
enum question { QUESTIONS(AS_ENUM) QUESTION_COUNT };
static const char *const question_names[] = { QUESTIONS(AS_TEXT) };

struct point { double at_s, value; };
struct curve { int steps, count; struct point points[MAX_POINTS]; };
struct process { unsigned pid; unsigned long long used_bytes; int under_mps; };

struct card {
    char uuid[MAX_NAME], name[MAX_NAME];
    double repeat_s;                     /* 0: the last value holds */
    struct curve curves[QUESTION_COUNT]; /* of xids: when, and which */
    int errors[QUESTION_COUNT];
    int tells_processes, process_count;
    struct process processes[MAX_PROCESSES];
    long long calls, lost_after_calls;   /* -1: never */
    double lost_for_s, lost_since_s;     /* -1: for good; not yet */
};

static struct card cards[MAX_CARDS];
static int card_count, missing_count, sessions;
static unsigned cuda_driver; /* 13000 is 13.0; 0: not told */
static char driver[MAX_NAME], missing[MAX_MISSING][MAX_NAME], script_path[MAX_PATH];
static double start_s;

/* ---- time and curves ------------------------------------------------------------------------------------------- */

static double elapsed_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* one clock for all processes of a machine */
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9 - start_s;
}

static double value_now(const struct card *card, const struct curve *curve)
{
    const struct point *points = curve->points;
    double at_s = elapsed_s();
    if (card->repeat_s > 0)
        at_s -= card->repeat_s * (double)(long long)(at_s / card->repeat_s);
    int next = 0;
    while (next < curve->count && points[next].at_s <= at_s)
        next++;
    if (next == 0)
        return points[0].value;
    if (next == curve->count || curve->steps)
        return points[next - 1].value;
    const double share = (at_s - points[next - 1].at_s) / (points[next].at_s - points[next - 1].at_s);
    return points[next - 1].value + share * (points[next].value - points[next - 1].value);
}

/* ---- the script ------------------------------------------------------------------------------------------------ */

static int find_question(const char *name)
{
    for (int question = 0; question < QUESTION_COUNT; question++)
        if (strcmp(question_names[question], name) == 0)
            return question;
    return -1;
}

static int read_curve(struct card *card, const char *text)
{
    char name[MAX_NAME], kind[8];
    int taken = 0;
    if (sscanf(text, "%95s %7s%n", name, kind, &taken) != 2)
        return 0;
    const int question = find_question(name);
    if (question < 0)
        return 0;
    struct curve *curve = &card->curves[question];
    curve->steps = strcmp(kind, "steps") == 0;
    struct point point;
    for (text += taken; sscanf(text, "%lf %lf%n", &point.at_s, &point.value, &taken) == 2; text += taken) {
        if (curve->count == MAX_POINTS)
            return 0;
        curve->points[curve->count++] = point;
    }
    return curve->count > 0;
}

static int read_error(struct card *card, const char *text)
{
    char name[MAX_NAME];
    int code;
    if (sscanf(text, "%95s %d", name, &code) != 2 || find_question(name) < 0)
        return 0;
    card->errors[find_question(name)] = code;
    return 1;
}

static int read_process(struct card *card, const char *text)
{
    if (card->process_count == MAX_PROCESSES)
        return 0;
    struct process *process = &card->processes[card->process_count++];
    return sscanf(text, "%u %llu %d", &process->pid, &process->used_bytes, &process->under_mps) == 3;
}

static int read_card(const char *text)
{
    if (card_count == MAX_CARDS)
        return 0;
    struct card *card = &cards[card_count++];
    memset(card, 0, sizeof *card);
    card->lost_after_calls = -1;
    card->lost_since_s = -1;
    return sscanf(text, "%95s %95[^\n]", card->uuid, card->name) == 2;
}

static int read_line(const char *line)
{
    char key[MAX_NAME];
    int taken = 0;
    if (sscanf(line, "%95s%n", key, &taken) != 1)
        return 0;
    const char *rest = line + taken;
    if (strcmp(key, "start_s") == 0)
        return sscanf(rest, "%lf", &start_s) == 1;
    if (strcmp(key, "driver") == 0)
        return sscanf(rest, "%95s", driver) == 1;
    if (strcmp(key, "cuda_driver") == 0)
        return sscanf(rest, "%u", &cuda_driver) == 1;
    if (strcmp(key, "missing") == 0)
        return missing_count < MAX_MISSING && sscanf(rest, "%95s", missing[missing_count++]) == 1;
    if (strcmp(key, "card") == 0)
        return read_card(rest);
    if (card_count == 0)
        return 0;
    struct card *card = &cards[card_count - 1];
    if (strcmp(key, "repeat_s") == 0)
        return sscanf(rest, "%lf", &card->repeat_s) == 1;
    if (strcmp(key, "curve") == 0)
        return read_curve(card, rest);
    if (strcmp(key, "error") == 0)
        return read_error(card, rest);
    if (strcmp(key, "processes") == 0)
        return card->tells_processes = 1;
    if (strcmp(key, "process") == 0)
        return read_process(card, rest);
    if (strcmp(key, "lost") == 0)
        return sscanf(rest, "%lld %lf", &card->lost_after_calls, &card->lost_for_s) == 2;
    return 0;
}

/* Reads the script; returns 0, the number of the first line that is not understood, or -1 if it cannot be opened. */
static int read_script(const char *path)
{
    static char line[MAX_LINE];
    FILE *file = fopen(path, "r");
    if (!file)
        return -1;
    snprintf(script_path, sizeof script_path, "%s", path);
    card_count = missing_count = 0;
    cuda_driver = 0;
    driver[0] = '\0';
    int number = 0, understood = 1;
    while (understood && fgets(line, sizeof line, file)) {
        number++;
        understood = strchr(line, '\n') && read_line(line);
    }
    fclose(file);
    return understood ? 0 : number;
}

/* ---- what holds for a whole driver or card ----------------------------------------------------------------------- */

static int is_missing(const char *function)
{
    for (int i = 0; i < missing_count; i++)
        if (strcmp(missing[i], function) == 0)
            return 1;
    return 0;
}

/* Counts the call. The one that loses the card is answered with the loss, however short it is. */
static int is_lost(struct card *card)
{
    if (card->lost_after_calls < 0 || ++card->calls <= card->lost_after_calls)
        return 0;
    if (card->lost_since_s < 0) {
        card->lost_since_s = elapsed_s();
        return 1;
    }
    return card->lost_for_s < 0 || elapsed_s() - card->lost_since_s < card->lost_for_s;
}
