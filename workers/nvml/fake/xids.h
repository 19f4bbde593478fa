/* Xid events of the fake NVML. Included once, by fake_nvml.c. */

struct event_set { int registered[MAX_CARDS], next[MAX_CARDS]; };
struct event { struct card *card; unsigned long long type, data; unsigned gpu_instance, compute_instance; };

EXPORT int nvmlEventSetCreate(struct event_set **set)
{
    if (!sessions)
        return UNINITIALIZED;
    *set = calloc(1, sizeof **set);
    return *set ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT int nvmlEventSetFree(struct event_set *set)
{
    free(set);
    return SUCCESS;
}

EXPORT int nvmlDeviceRegisterEvents(struct card *card, unsigned long long types, struct event_set *set)
{
    const int status = may_ask(card, Q_xids, __func__);
    if (status != SUCCESS)
        return status;
    if (types != 8 || card->curves[Q_xids].count == 0) /* nvmlEventTypeXidCriticalError */
        return NOT_SUPPORTED;
    set->registered[card - cards] = 1;
    return SUCCESS;
}

/* Tells a process that comes late of the earlier ones too, and never waits: nobody here asks it to. */
EXPORT int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms)
{
    (void)timeout_ms;
    for (int i = 0; i < card_count; i++) {
        const struct curve *xids = &cards[i].curves[Q_xids];
        if (!set->registered[i] || set->next[i] == xids->count || xids->points[set->next[i]].at_s > elapsed_s())
            continue;
        const unsigned long long xid = (unsigned long long)whole(xids->points[set->next[i]++].value);
        *event = (struct event){&cards[i], 8, xid, 0xFFFFFFFFu, 0xFFFFFFFFu};
        return SUCCESS;
    }
    return TIMEOUT;
}
