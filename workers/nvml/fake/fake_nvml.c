/* Answers like NVIDIA's NVML, out of a script, so that the whole path from nvidia-ml-py to a decision about a hot card
 * runs on machines without one.
 *
 * Covers what `workers/` asks, under the names and versions that nvidia-ml-py looks up; the layouts are those of its
 * structures. What the script does not mention is "not supported", as on a real card. What is set (a power limit, a memory
 * offset) holds for all processes alike, and longer than any of them. Knows no MIG, and is not safe with threads. The script is the flat
 * text that `workers/nvml/fake/script.py` writes.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <unistd.h>

#include "script.h"

#define EXPORT __attribute__((visibility("default")))

/* nvmlReturn_t */
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, OUT_OF_MEMORY = 20, UNKNOWN = 999
};

/* Returns 0, the number of the first line that is not understood, or -1 if the file cannot be opened. */
EXPORT int fake_nvml_script(const char *path)
{
    return read_script(path);
}

/* ---- what every question has in common --------------------------------------------------------------------------- */

static int may_ask(struct card *card, enum question question, const char *function)
{
    if (!sessions)
        return UNINITIALIZED;
    if (card < cards || card >= cards + card_count)
        return INVALID_ARGUMENT;
    if (is_missing(function))
        return FUNCTION_NOT_FOUND;
    if (is_lost(card))
        return GPU_IS_LOST;
    return card->errors[question];
}

static int ask(struct card *card, enum question question, const char *function, double *value)
{
    const int status = may_ask(card, question, function);
    if (status != SUCCESS)
        return status;
    if (card->curves[question].count == 0)
        return NOT_SUPPORTED;
    *value = value_now(card, &card->curves[question]);
    return SUCCESS;
}

static long long whole(double value)
{
    return (long long)(value < 0 ? value - 0.5 : value + 0.5);
}

static int ask_uint(struct card *card, enum question question, const char *function, double scale, unsigned *answer)
{
    double value;
    const int status = ask(card, question, function, &value);
    if (status == SUCCESS)
        *answer = (unsigned)whole(value * scale);
    return status;
}

static int ask_ull(struct card *card, enum question question, const char *function, unsigned long long *answer)
{
    double value;
    const int status = ask(card, question, function, &value);
    if (status == SUCCESS)
        *answer = (unsigned long long)whole(value);
    return status;
}

/* ---- the library and its cards ----------------------------------------------------------------------------------- */

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    sessions++;
    return SUCCESS;
}

EXPORT int nvmlShutdown(void)
{
    if (!sessions)
        return UNINITIALIZED;
    sessions--;
    return SUCCESS;
}

static int copy_text(const char *text, char *buffer, unsigned size)
{
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *buffer, unsigned size)
{
    if (!sessions)
        return UNINITIALIZED;
    return driver[0] ? copy_text(driver, buffer, size) : NOT_SUPPORTED;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (!sessions)
        return UNINITIALIZED;
    *version = (int)cuda_driver;
    return cuda_driver ? SUCCESS : NOT_SUPPORTED;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!sessions)
        return UNINITIALIZED;
    *count = (unsigned)card_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct card **handle)
{
    if (!sessions)
        return UNINITIALIZED;
    if (index >= (unsigned)card_count)
        return INVALID_ARGUMENT;
    *handle = &cards[index];
    return is_lost(*handle) ? GPU_IS_LOST : SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct card **handle)
{
    if (!sessions)
        return UNINITIALIZED;
    for (int i = 0; i < card_count; i++)
        if (strcmp(cards[i].uuid, uuid) == 0)
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    return NOT_FOUND;
}

#define NAMES(function, member) \
    EXPORT int function(struct card *card, char *buffer, unsigned size) \
    { \
        const int status = may_ask(card, Q_total_bytes, __func__); \
        return status == SUCCESS ? copy_text(card->member, buffer, size) : status; \
    }

NAMES(nvmlDeviceGetUUID, uuid)
NAMES(nvmlDeviceGetName, name)

EXPORT int nvmlDeviceGetCudaComputeCapability(struct card *card, int *major, int *minor)
{
    unsigned tenfold;
    const int status = ask_uint(card, Q_compute_capability, __func__, 10, &tenfold);
    if (status == SUCCESS) {
        *major = (int)(tenfold / 10);
        *minor = (int)(tenfold % 10);
    }
    return status;
}

/* ---- memory and processes ---------------------------------------------------------------------------------------- */

struct memory { unsigned long long total, free, used; };

EXPORT int nvmlDeviceGetMemoryInfo(struct card *card, struct memory *memory)
{
    unsigned long long reserved = 0;
    int status = ask_ull(card, Q_total_bytes, __func__, &memory->total);
    if (status == SUCCESS)
        status = ask_ull(card, Q_used_bytes, __func__, &memory->used);
    if (status == SUCCESS)
        status = ask_ull(card, Q_reserved_bytes, __func__, &reserved);
    if (status == SUCCESS) {
        memory->used += reserved; /* so newer drivers count here, and apart in the second version */
        memory->free = memory->total - memory->used;
    }
    return status;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

EXPORT int nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *memory)
{
    int status = ask_ull(card, Q_total_bytes, __func__, &memory->total);
    if (status == SUCCESS)
        status = ask_ull(card, Q_used_bytes, __func__, &memory->used);
    if (status == SUCCESS)
        status = ask_ull(card, Q_reserved_bytes, __func__, &memory->reserved);
    if (status == SUCCESS)
        memory->free = memory->total - memory->used - memory->reserved;
    return status;
}

struct process_info { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; };

static int list_processes(struct card *card, int under_mps, const char *function, unsigned *count,
                          struct process_info *infos)
{
    const int status = may_ask(card, Q_processes, function);
    if (status != SUCCESS)
        return status;
    if (!card->tells_processes)
        return NOT_SUPPORTED;
    unsigned found = 0;
    for (int i = 0; i < card->process_count; i++) {
        const struct process *process = &card->processes[i];
        if (process->under_mps != under_mps)
            continue;
        if (found < *count && infos)
            infos[found] = (struct process_info){
                .pid = process->pid ? process->pid : (unsigned)getpid(), /* 0: whoever asks */
                .used_bytes = process->used_bytes,
                .gpu_instance = 0xFFFFFFFFu,
                .compute_instance = 0xFFFFFFFFu,
            };
        found++;
    }
    const int fits = found <= *count && (infos || found == 0);
    *count = found;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}

#define LISTS(function, under_mps) \
    EXPORT int function(struct card *card, unsigned *count, struct process_info *infos) \
    { \
        return list_processes(card, under_mps, __func__, count, infos); \
    }

LISTS(nvmlDeviceGetComputeRunningProcesses_v2, 0)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, 0)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v2, 1)
LISTS(nvmlDeviceGetMPSComputeRunningProcesses_v3, 1)

/* ---- sensors ----------------------------------------------------------------------------------------------------- */

#define TELLS(function, question, scale) \
    EXPORT int function(struct card *card, unsigned *answer) \
    { \
        return ask_uint(card, question, __func__, scale, answer); \
    }

TELLS(nvmlDeviceGetPowerUsage, Q_power_average_w, 1000)
TELLS(nvmlDeviceGetPowerManagementDefaultLimit, Q_power_limit_default_w, 1000)
TELLS(nvmlDeviceGetFanSpeed, Q_fan_pct, 1)
TELLS(nvmlDeviceGetCurrPcieLinkGeneration, Q_pcie_generation, 1)
TELLS(nvmlDeviceGetCurrPcieLinkWidth, Q_pcie_lanes, 1)
TELLS(nvmlDeviceGetPersistenceMode, Q_persistence_mode, 1)
TELLS(nvmlDeviceGetComputeMode, Q_compute_mode, 1)

#define TELLS_WIDE(function, question) \
    EXPORT int function(struct card *card, unsigned long long *answer) \
    { \
        return ask_ull(card, question, __func__, answer); \
    }

TELLS_WIDE(nvmlDeviceGetCurrentClocksEventReasons, Q_throttle)
TELLS_WIDE(nvmlDeviceGetCurrentClocksThrottleReasons, Q_throttle)

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(struct card *card, unsigned *least, unsigned *most)
{
    const int status = ask_uint(card, Q_power_limit_min_w, __func__, 1000, least);
    return status == SUCCESS ? ask_uint(card, Q_power_limit_max_w, __func__, 1000, most) : status;
}

EXPORT int nvmlDeviceGetTemperature(struct card *card, unsigned sensor, unsigned *answer)
{
    return sensor == 0 ? ask_uint(card, Q_temperature_c, __func__, 1, answer) : INVALID_ARGUMENT;
}

struct temperature { unsigned version, sensor; int value_c; };

EXPORT int nvmlDeviceGetTemperatureV(struct card *card, struct temperature *answer)
{
    return answer->sensor == 0 ? ask_uint(card, Q_temperature_c, __func__, 1, (unsigned *)&answer->value_c)
                               : INVALID_ARGUMENT;
}

struct margin { unsigned version; int value_c; };

EXPORT int nvmlDeviceGetMarginTemperature(struct card *card, struct margin *answer)
{
    return ask_uint(card, Q_margin_c, __func__, 1, (unsigned *)&answer->value_c);
}

EXPORT int nvmlDeviceGetTemperatureThreshold(struct card *card, unsigned threshold, unsigned *answer)
{
    /* 1: NVML_TEMPERATURE_THRESHOLD_SLOWDOWN */
    return threshold == 1 ? ask_uint(card, Q_slowdown_c, __func__, 1, answer) : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetClockInfo(struct card *card, unsigned clock, unsigned *answer)
{
    /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    return clock == 1   ? ask_uint(card, Q_sm_clock_mhz, __func__, 1, answer)
           : clock == 2 ? ask_uint(card, Q_memory_clock_mhz, __func__, 1, answer)
                        : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetMaxClockInfo(struct card *card, unsigned clock, unsigned *answer)
{
    return clock == 1 ? ask_uint(card, Q_sm_clock_max_mhz, __func__, 1, answer) : NOT_SUPPORTED;
}

struct utilisation { unsigned gpu, memory; };

EXPORT int nvmlDeviceGetUtilizationRates(struct card *card, struct utilisation *answer)
{
    answer->memory = 0;
    return ask_uint(card, Q_utilisation_pct, __func__, 1, &answer->gpu);
}

EXPORT int nvmlDeviceGetEccMode(struct card *card, unsigned *current, unsigned *pending)
{
    const int status = ask_uint(card, Q_ecc_enabled, __func__, 1, current);
    if (status == SUCCESS)
        *pending = *current;
    return status;
}

EXPORT int nvmlDeviceGetTotalEccErrors(struct card *card, unsigned type, unsigned counter, unsigned long long *errors)
{
    /* Uncorrected ones since the driver was loaded; the script has no others. */
    return type == 1 && counter == 0 ? ask_ull(card, Q_ecc_errors, __func__, errors) : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetRemappedRows(struct card *card, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                     unsigned *failed)
{
    *corrected = *pending = *failed = 0;
    return ask_uint(card, Q_remapped_rows, __func__, 1, uncorrected);
}

struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    unsigned type, status;
    union { double number; unsigned unsigned_int; unsigned long long wide; int signed_int; } value;
};

EXPORT int nvmlDeviceGetFieldValues(struct card *card, int count, struct field *fields)
{
    for (int i = 0; i < count; i++) {
        struct field *field = &fields[i];
        field->value.wide = 0;
        field->type = 1; /* NVML_VALUE_TYPE_UNSIGNED_INT */
        unsigned *answer = &field->value.unsigned_int;
        switch (field->id) {
        case 82: /* NVML_FI_DEV_MEMORY_TEMP */
            field->status = (unsigned)ask_uint(card, Q_memory_temperature_c, __func__, 1, answer);
            break;
        case 186: /* NVML_FI_DEV_POWER_INSTANT */
            field->status = (unsigned)ask_uint(card, Q_power_w, __func__, 1000, answer);
            break;
        case 194: /* NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT */
            field->type = 5; /* NVML_VALUE_TYPE_SIGNED_INT */
            field->status = (unsigned)ask_uint(card, Q_slowdown_tlimit_c, __func__, 1, answer);
            break;
        default:
            field->status = INVALID_ARGUMENT;
        }
    }
    return SUCCESS;
}

#include "settings.h"
#include "xids.h"
