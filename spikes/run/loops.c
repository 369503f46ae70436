/* Loops over files of 4 KiB: microseconds a call. loops DIRECTORY FILES LARGE_MIB
   LARGE_MIB 0 only looks at files that are there: make them with -1. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char buffer[1 << 20];
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
static void fail(const char *what) { perror(what); exit(1); }
static const char *name(char *to, const char *dir, const char *kind, int i) {
    sprintf(to, "%s/%d/%s%d", dir, i / 1000, kind, i);
    return to;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const char *dir = argv[1];
    int n = atoi(argv[2]), mib = atoi(argv[3]);
    char a[4096], b[4096];
    struct stat st;
    memset(buffer, 'x', sizeof buffer);
    for (int i = 0; mib && i < n; i += 1000) {
        sprintf(a, "%s/%d", dir, i / 1000);
        if (mkdir(a, 0755)) fail(a);
    }
#define LOOP(label, body) { double from = now(); for (int i = 0; i < n; i++) { body } \
        printf("%s %.2f\n", label, (now() - from) / n); fflush(stdout); }
    if (!mib) {
        LOOP("stat_after_mount", if (stat(name(a, dir, "f", i), &st) || st.st_size != 4096) fail(a);)
        LOOP("stat_once_more", if (stat(name(a, dir, "f", i), &st) || st.st_size != 4096) fail(a);)
        LOOP("read_after_mount", int fd = open(name(a, dir, "f", i), O_RDONLY);
            if (fd < 0 || read(fd, buffer, 8192) != 4096 || buffer[4095] != 'x') fail(a); close(fd);)
        return 0;
    }
    LOOP("create", int fd = open(name(a, dir, "f", i), O_CREAT | O_WRONLY | O_EXCL, 0644);
        if (fd < 0 || write(fd, buffer, 4096) != 4096) fail(a); close(fd);)
    if (mib < 0) return 0;
    LOOP("stat", if (stat(name(a, dir, "f", i), &st) || st.st_size != 4096) fail(a);)
    LOOP("read", int fd = open(name(a, dir, "f", i), O_RDONLY);
        if (fd < 0 || read(fd, buffer, 8192) != 4096 || buffer[4095] != 'x') fail(a); close(fd);)
    LOOP("rename", if (rename(name(a, dir, "f", i), name(b, dir, "g", i))) fail(a);)
    LOOP("unlink", if (unlink(name(a, dir, "g", i))) fail(a);)
    sprintf(a, "%s/large", dir);
    double from = now();
    int fd = open(a, O_CREAT | O_WRONLY, 0644);
    for (int i = 0; i < mib; i++) if (write(fd, buffer, 1 << 20) != 1 << 20) fail(a);
    if (fsync(fd)) fail(a);
    close(fd);
    printf("write_large_MB/s %.0f\n", mib * 1048576.0 / (now() - from));
    for (int again = 0; again < 2; again++) {
        from = now();
        fd = open(a, O_RDONLY);
        for (int i = 0; i < mib; i++) if (read(fd, buffer, 1 << 20) != 1 << 20) fail(a);
        close(fd);
        printf("read_large_%s_MB/s %.0f\n", again ? "again" : "first", mib * 1048576.0 / (now() - from));
    }
    unlink(a);
    return 0;
}
