/* What can be set on a card of the fake NVML: its power limit and its memory offset. What is set is kept in files beside
 * the script. Included once, by fake_nvml.c.
 */

static void name_file(char *path, size_t size, const struct card *card, const char *what, const char *ending)
{
    snprintf(path, size, "%s.%s-%d%s", script_path, what, (int)(card - cards), ending);
}

/* Replaces the answer of the script by what was set, if anything was. */
static int answer_set(const struct card *card, const char *what, int *answer)
{
    char path[MAX_PATH + 32];
    name_file(path, sizeof path, card, what, "");
    FILE *file = fopen(path, "r");
    if (!file)
        return SUCCESS;
    const int understood = fscanf(file, "%d", answer);
    fclose(file);
    return understood == 1 ? SUCCESS : UNKNOWN;
}

static int keep_set(const struct card *card, const char *what, int value)
{
    char path[MAX_PATH + 32], fresh[MAX_PATH + 32];
    name_file(path, sizeof path, card, what, "");
    name_file(fresh, sizeof fresh, card, what, ".fresh");
    FILE *file = fopen(fresh, "w");
    if (!file)
        return UNKNOWN;
    const int written = fprintf(file, "%d\n", value) > 0;
    return fclose(file) == 0 && written && rename(fresh, path) == 0 ? SUCCESS : UNKNOWN;
}

/* ---- the power limit, in milliwatts ------------------------------------------------------------------------------ */

static int power_limit_mw(struct card *card, const char *function, unsigned *answer)
{
    const int status = ask_uint(card, Q_power_limit_w, function, 1000, answer);
    return status == SUCCESS ? answer_set(card, "limit", (int *)answer) : status;
}

EXPORT int nvmlDeviceGetPowerManagementLimit(struct card *card, unsigned *answer)
{
    return power_limit_mw(card, __func__, answer);
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(struct card *card, unsigned *answer)
{
    return power_limit_mw(card, __func__, answer);
}

EXPORT int nvmlDeviceSetPowerManagementLimit(struct card *card, unsigned limit_mw)
{
    unsigned current, least, most;
    int status = may_ask(card, Q_set_power_limit, __func__);
    if (status == SUCCESS)
        status = power_limit_mw(card, __func__, &current);
    if (status == SUCCESS)
        status = nvmlDeviceGetPowerManagementLimitConstraints(card, &least, &most);
    if (status != SUCCESS)
        return status;
    if (limit_mw < least || limit_mw > most)
        return INVALID_ARGUMENT;
    return keep_set(card, "limit", (int)limit_mw);
}

/* ---- the memory offset, in MHz ----------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetMemClkVfOffset(struct card *card, int *answer)
{
    const int status = ask_uint(card, Q_memory_offset_mhz, __func__, 1, (unsigned *)answer);
    return status == SUCCESS ? answer_set(card, "offset", answer) : status;
}

EXPORT int nvmlDeviceGetMemClkMinMaxVfOffset(struct card *card, int *least, int *most)
{
    const int status = ask_uint(card, Q_memory_offset_min_mhz, __func__, 1, (unsigned *)least);
    return status == SUCCESS ? ask_uint(card, Q_memory_offset_max_mhz, __func__, 1, (unsigned *)most) : status;
}

EXPORT int nvmlDeviceSetMemClkVfOffset(struct card *card, int offset_mhz)
{
    int least, most;
    int status = may_ask(card, Q_set_memory_offset, __func__);
    if (status == SUCCESS)
        status = nvmlDeviceGetMemClkMinMaxVfOffset(card, &least, &most);
    if (status != SUCCESS)
        return status;
    if (offset_mhz < least || offset_mhz > most)
        return INVALID_ARGUMENT;
    return keep_set(card, "offset", offset_mhz);
}
