/* The power limit of the fake NVML: what is set is kept in a file beside the script. Included once, by fake_nvml.c. */

static void name_limit_file(char *path, size_t size, const struct card *card, const char *ending)
{
    snprintf(path, size, "%s.limit-%d%s", script_path, (int)(card - cards), ending);
}

static int power_limit_mw(struct card *card, const char *function, unsigned *answer)
{
    const int status = ask_uint(card, Q_power_limit_w, function, 1000, answer);
    if (status != SUCCESS)
        return status;
    char path[MAX_PATH + 32];
    name_limit_file(path, sizeof path, card, "");
    FILE *file = fopen(path, "r");
    if (file) {
        const int understood = fscanf(file, "%u", answer);
        fclose(file);
        return understood == 1 ? SUCCESS : UNKNOWN;
    }
    return SUCCESS;
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
    char path[MAX_PATH + 32], fresh[MAX_PATH + 32];
    name_limit_file(path, sizeof path, card, "");
    name_limit_file(fresh, sizeof fresh, card, ".fresh");
    FILE *file = fopen(fresh, "w");
    if (!file)
        return UNKNOWN;
    const int written = fprintf(file, "%u\n", limit_mw) > 0;
    return fclose(file) == 0 && written && rename(fresh, path) == 0 ? SUCCESS : UNKNOWN;
}
