/* Uses all of draconis.h. Called with a directory to work in, and "volumes" where only these are to
 * be used; says what failed, and where. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "draconis.h"

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #what,                          \
                    draconis_error_message());                                                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static char path[4096];

static const char *in(const char *dir, const char *name) {
    int len = snprintf(path, sizeof path, "%s/%s", dir, name);
    CHECK(len > 0 && (size_t)len < sizeof path);
    return path;
}

static int to_file(void *context, const void *bytes, size_t len) {
    return fwrite(bytes, 1, len, context) == len ? 0 : EIO;
}

static int to_nowhere(void *context, const void *bytes, size_t len) {
    (void)bytes;
    (void)len;
    ++*(int *)context;
    return ENOSPC;
}

static void count_complaints(void *context, const char *complaint) {
    CHECK(strlen(complaint) > 0);
    ++*(int *)context;
}

static void files(const char *dir) {
    draconis_format_options how = {0};
    how.size_bytes = 16 << 20;
    how.label = "from C";
    const char *image = in(dir, "c.img");
    CHECK(draconis_format(image, &how) == 0);
    CHECK(draconis_format(image, &how) == -EEXIST);
    CHECK(strstr(draconis_error_message(), "c.img holds"));

    draconis_volume *volume, *other;
    CHECK(draconis_volume_open(image, NULL, DRACONIS_WRITE, &volume) == 0);
    CHECK(draconis_volume_open(image, NULL, 0, &other) == -EBUSY && other == NULL);
    draconis_volume_info info;
    CHECK(draconis_volume_get_info(volume, &info) == 0);
    CHECK(strcmp(info.kind, "ext4") == 0 && strcmp(info.label, "from C") == 0);
    CHECK(info.size_bytes == 16 << 20 && info.free_inodes < info.inodes);

    CHECK(draconis_mkdir(volume, "/etc", 0755) == 0);
    CHECK(draconis_mkdir(volume, "/etc", 0755) == -EEXIST);
    draconis_file *file;
    CHECK(draconis_file_open(volume, "/etc/hosts", 0, 0, &file) == -ENOENT && file == NULL);
    CHECK(strstr(draconis_error_message(), "c.img:/etc/hosts: no such file"));
    unsigned make = DRACONIS_WRITE | DRACONIS_CREATE | DRACONIS_EXCLUSIVE;
    CHECK(draconis_file_open(volume, "/etc/hosts", make, 0644, &file) == 0);
    CHECK(draconis_file_write(file, 0, "127.0.0.1 localhost\n", 20) == 20);
    CHECK(draconis_file_truncate(file, 1 << 20) == 0 && draconis_file_truncate(file, 20) == 0);
    CHECK(draconis_file_sync(file) == 0);
    char buffer[64];
    CHECK(draconis_file_read(file, 10, buffer, sizeof buffer) == 10);
    CHECK(memcmp(buffer, "localhost\n", 10) == 0);
    CHECK(draconis_file_read(file, 0, NULL, 1) == -EINVAL);
    draconis_stat_data data;
    CHECK(draconis_file_stat(file, &data) == 0 && data.size_bytes == 20);
    CHECK(S_ISREG(data.mode) && (data.mode & 07777) == 0644);
    draconis_file_close(file);

    CHECK(draconis_symlink(volume, "etc/hosts", "/hosts") == 0);
    CHECK(draconis_readlink(volume, "/hosts", buffer, 3) == 9 && memcmp(buffer, "etc", 3) == 0);
    CHECK(draconis_stat(volume, "/hosts", 0, &data) == 0 && S_ISREG(data.mode));
    CHECK(draconis_stat(volume, "/hosts", DRACONIS_NOFOLLOW, &data) == 0 && S_ISLNK(data.mode));
    CHECK(draconis_stat(volume, "/hosts", DRACONIS_WRITE, &data) == -EINVAL);
    CHECK(draconis_link(volume, "/etc/hosts", "/etc/again") == 0);
    CHECK(draconis_rename(volume, "/etc/again", "/hosts", DRACONIS_NOREPLACE) == -EEXIST);
    CHECK(draconis_rename(volume, "/etc/again", "/etc/moved", 0) == 0);
    CHECK(draconis_chmod(volume, "/etc/moved", 0600, 0) == 0);
    CHECK(draconis_chown(volume, "/etc/moved", 7, 8, 0) == 0);
    draconis_time then = {1000000000, 5};
    CHECK(draconis_utimes(volume, "/etc/moved", then, then, 0) == 0);
    CHECK(draconis_stat(volume, "/etc/moved", 0, &data) == 0 && data.links == 2);
    CHECK(data.uid == 7 && data.gid == 8 && (data.mode & 07777) == 0600);
    CHECK(data.modified.seconds == then.seconds && data.modified.nanoseconds == 5);
    CHECK(draconis_listxattr(volume, "/etc/moved", 0, NULL, 0) == 0);
    CHECK(draconis_getxattr(volume, "/etc/moved", "user.x", 0, NULL, 0) == -ENODATA);
    CHECK(draconis_setxattr(volume, "/etc/moved", "user.x", "value", 5, DRACONIS_EXCLUSIVE) == 0);
    CHECK(draconis_setxattr(volume, "/etc/moved", "user.x", "v", 1, DRACONIS_EXCLUSIVE) == -EEXIST);
    CHECK(draconis_setxattr(volume, "/etc/moved", "user.x", "v", 1, DRACONIS_WRITE) == -EINVAL);
    CHECK(draconis_getxattr(volume, "/etc/moved", "user.x", 0, buffer, 5) == 5);
    CHECK(memcmp(buffer, "value", 5) == 0);
    CHECK(draconis_setxattr(volume, "/etc/moved", "user.x", NULL, 0, 0) == 0);
    CHECK(draconis_listxattr(volume, "/etc/moved", 0, buffer, 7) == 7);
    CHECK(memcmp(buffer, "user.x", 7) == 0);
    CHECK(draconis_removexattr(volume, "/etc/moved", "user.x", 0) == 0);
    CHECK(draconis_removexattr(volume, "/etc/moved", "user.x", 0) == -ENODATA);

    draconis_dir *listing;
    draconis_entry entry;
    CHECK(draconis_dir_open(volume, "/etc", &listing) == 0);
    CHECK(draconis_dir_next(listing, &entry) == 1 && strcmp(entry.name, "hosts") == 0);
    CHECK(S_ISREG(entry.kind) && entry.inode == data.inode);
    CHECK(draconis_dir_next(listing, &entry) == 1 && strcmp(entry.name, "moved") == 0);
    CHECK(draconis_dir_next(listing, &entry) == 0 && entry.name == NULL);
    draconis_dir_close(listing);
    CHECK(draconis_dir_open(volume, "/etc/hosts", &listing) == -ENOTDIR);
    CHECK(draconis_rmdir(volume, "/etc") == -ENOTEMPTY);
    CHECK(draconis_unlink(volume, "/etc/moved") == 0);

    FILE *archive = tmpfile();
    CHECK(archive && draconis_tar(volume, "/etc", to_file, archive) == 0 && ftell(archive) > 1024);
    fclose(archive);
    int asked = 0;
    CHECK(draconis_tar(volume, "/etc", to_nowhere, &asked) == -ENOSPC && asked == 1);
    CHECK(strstr(draconis_error_message(), "c.img:/etc: No space left"));
    CHECK(draconis_tar(volume, "/etc", NULL, NULL) == -EINVAL);

    /* What outlives its volume is refused, not followed. */
    CHECK(draconis_file_open(volume, "/etc/hosts", 0, 0, &file) == 0);
    CHECK(draconis_volume_sync(volume) == 0 && draconis_volume_close(volume) == 0);
    CHECK(draconis_file_read(file, 0, buffer, 1) == -EBADF);
    draconis_file_close(file);

    int complaints = 0;
    draconis_check_report report;
    CHECK(draconis_check(in(dir, "c.img"), NULL, count_complaints, &complaints, &report) == 0);
    CHECK(report.clean && report.complete && complaints == 0 && report.complaints == 0);
    CHECK(report.used_inodes == 13 + 1 && report.blocks > report.used_blocks);

    draconis_place place = {0};
    place.partition = 3;
    CHECK(draconis_volume_open(path, &place, 0, &volume) == -EINVAL);
    CHECK(draconis_volume_open(in(dir, "none.img"), NULL, 0, &volume) == -ENOENT);
    CHECK(draconis_volume_open(NULL, NULL, 0, &volume) == -EINVAL);
    CHECK(strcmp(draconis_error_message(), "image is NULL") == 0);
    CHECK(draconis_volume_open(in(dir, "c.img"), NULL, 0, NULL) == -EINVAL);
    CHECK(draconis_stat(NULL, "/", 0, &data) == -EINVAL);
    CHECK(draconis_volume_close(NULL) == 0);
}

/* Ends as programs do; what a child inherited is leaked, which the sanitizer would complain about. */
static void end_child(void) {
#ifdef __SANITIZE_ADDRESS__
    _exit(0);
#else
    exit(0);
#endif
}

static void things(const char *dir) {
    draconis_store_options how = {0};
    how.size_bytes = 8 << 20;
    how.layout = DRACONIS_LAYOUT_COW;
    how.sparse = 1;
    CHECK(draconis_store_create(in(dir, "c.store"), &how) == 0);
    CHECK(draconis_store_create(path, &how) == -EEXIST);
    draconis_store *store;
    CHECK(draconis_store_open(path, DRACONIS_WRITE, &store) == 0);

    draconis_group *group = draconis_group_new();
    uint64_t letter, ticket, found, size;
    CHECK(draconis_group_create(group, store, &letter) == 0);
    CHECK(draconis_group_append(group, letter, "Dear reader,\n", 13) == 0);
    CHECK(draconis_group_write(group, letter, 0, "d", 1) == 0);
    CHECK(draconis_group_truncate(group, letter, 12) == 0);
    CHECK(draconis_group_name(group, "letter", 6, letter) == 0);
    CHECK(draconis_store_submit(store, group, &ticket) == 0);
    CHECK(draconis_store_wait(store, ticket) == 0);
    CHECK(draconis_object_named(store, "letter", 6, &found) == 0 && found == letter);
    CHECK(draconis_object_named(store, "post", 4, &found) == -ENOENT && found == 0);
    CHECK(draconis_object_size(store, letter) == 12);
    char buffer[64];
    CHECK(draconis_object_read(store, letter, 0, buffer, sizeof buffer) == 12);
    CHECK(memcmp(buffer, "dear reader,", 12) == 0);
    CHECK(draconis_object_read(store, 77, 0, buffer, 1) == -ENOENT);
    draconis_object_list *all;
    CHECK(draconis_object_list_open(store, &all) == 0);
    CHECK(draconis_object_list_next(all, &found, &size) == 1 && found == letter && size == 12);
    CHECK(draconis_object_list_next(all, NULL, NULL) == 0);
    draconis_object_list_close(all);
    group = draconis_group_new();
    CHECK(draconis_group_delete(group, letter) == 0);
    CHECK(draconis_group_unname(group, "letter", 6) == 0);
    CHECK(draconis_store_submit(store, group, NULL) == 0);
    draconis_group_free(draconis_group_new());

    draconis_batch *batch = draconis_batch_new();
    CHECK(draconis_batch_put(batch, "a", 1, "1", 1) == 0);
    CHECK(draconis_batch_put(batch, "b", 1, "2", 1) == 0);
    CHECK(draconis_batch_delete(batch, "c", 1) == 0);
    CHECK(draconis_keys_write(store, batch, &ticket) == 0);
    CHECK(draconis_keys_put(store, "c", 1, NULL, 0, NULL) == 0);
    CHECK(draconis_keys_delete(store, "b", 1, NULL) == 0);
    draconis_batch_free(draconis_batch_new());
    CHECK(draconis_store_sync(store) == 0);
    draconis_value *value;
    CHECK(draconis_keys_get(store, "b", 1, &value) == 0 && value == NULL);
    CHECK(draconis_keys_get(store, "a", 1, &value) == 1);
    draconis_bytes bytes = draconis_value_bytes(value), key;
    CHECK(bytes.len == 1 && memcmp(bytes.bytes, "1", 1) == 0);
    draconis_value_free(value);
    draconis_scan *scan;
    CHECK(draconis_scan_open(store, NULL, 0, "c", 1, 0, &scan) == 0);
    CHECK(draconis_scan_next(scan, &key, &bytes) == 1 && memcmp(key.bytes, "a", 1) == 0);
    CHECK(draconis_scan_next(scan, &key, NULL) == 0);
    draconis_scan_close(scan);
    CHECK(draconis_scan_open(store, NULL, 0, NULL, 0, DRACONIS_REVERSE, &scan) == 0);
    CHECK(draconis_scan_next(scan, &key, &bytes) == 1 && memcmp(key.bytes, "c", 1) == 0);
    CHECK(bytes.len == 0);
    draconis_scan_close(scan);
    /* A forked child cannot use what it inherited, ends as programs do, and keeps no lock. */
    CHECK(draconis_scan_open(store, NULL, 0, NULL, 0, 0, &scan) == 0);
    int ends[2], status;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(draconis_keys_get(store, "a", 1, &value) == -EBADF);
        CHECK(strstr(draconis_error_message(), "this process is a fork"));
        CHECK(draconis_store_sync(store) == -EBADF);
        CHECK(draconis_scan_next(scan, &key, NULL) == -EBADF);
        draconis_scan_close(scan);
        CHECK(draconis_store_close(store) == -EBADF);
        CHECK(draconis_store_open(path, 0, &store) == -EBUSY);
        CHECK(close(ends[1]) == 0 && write(ends[0], "x", 1) == 1);
        CHECK(read(ends[0], buffer, 1) == 0);
        end_child();
    }
    CHECK(child > 0 && close(ends[0]) == 0 && read(ends[1], buffer, 1) == 1);
    draconis_scan_close(scan);
    CHECK(draconis_store_close(store) == 0 && draconis_store_close(NULL) == 0);
    CHECK(draconis_store_open(path, DRACONIS_WRITE, &store) == 0);
    CHECK(draconis_store_close(store) == 0);
    CHECK(close(ends[1]) == 0 && waitpid(child, &status, 0) == child && status == 0);

    draconis_store_report report;
    CHECK(draconis_store_check(path, &report) == 0);
    CHECK(report.clean && report.complete && report.objects == 0 && report.keys == 2);
    CHECK(draconis_store_open(in(dir, "c.img"), 0, &store) == -EINVAL);
    CHECK(draconis_store_open("s3://bucket/store", 0, &store) == -EOPNOTSUPP);
}

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(name, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* The length of a volume that is filled so. */
static uint64_t size_of(const char *image, draconis_format_options *how, draconis_fill_options *fill) {
    struct stat found;
    remove(image);
    CHECK(draconis_format_filled(image, how, fill, NULL, NULL) == 0);
    CHECK(stat(image, &found) == 0);
    remove(image);
    return (uint64_t)found.st_size;
}

/* A volume that is filled, in a disk image and in a file, made larger and smaller, and renamed. */
static void filled(const char *dir) {
    CHECK(mkdir(in(dir, "tree"), 0755) == 0 && mkdir(in(dir, "tree/etc"), 0755) == 0);
    write_file(in(dir, "tree/etc/motd"), "hello\n");
    write_file(in(dir, "tree/etc/left.o"), "out");
    char tree[4096];
    strcpy(tree, in(dir, "tree"));
    const char *from[] = {tree}, *exclude[] = {"*.o"};
    draconis_format_options how = {0};
    how.kind = "ext4";
    draconis_fill_options fill = {0};
    fill.from = from;
    fill.from_count = 1;
    fill.exclude = exclude;
    fill.exclude_count = 1;
    fill.give = 1;
    fill.uid = 12;
    fill.gid = 34;
    fill.free_bytes = 4 << 20;
    int notes = 0;
    const char *kinds[] = {NULL, "qcow2", "vhdx"};
    for (int nth = 0; nth < 3; nth++) {
        fill.image_format = kinds[nth];
        const char *image = in(dir, nth == 0 ? "filled.img" : kinds[nth]);
        CHECK(draconis_format_filled(image, &how, &fill, count_complaints, &notes) == 0);
        CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EEXIST);
        draconis_volume *volume;
        draconis_stat_data data;
        CHECK(draconis_volume_open(image, NULL, DRACONIS_WRITE, &volume) == 0);
        CHECK(draconis_stat(volume, "/etc/motd", 0, &data) == 0);
        CHECK(data.size_bytes == 6 && data.uid == 12 && data.gid == 34);
        CHECK(draconis_stat(volume, "/etc/left.o", 0, &data) == -ENOENT);
        CHECK(draconis_mkdir(volume, "/new", 0755) == 0);
        CHECK(draconis_volume_close(volume) == 0);
    }
    CHECK(notes == 0);
    const char *image = in(dir, "none");
    fill.image_format = "vmdk";
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EINVAL);
    fill.image_format = NULL;
    fill.platform = "nothing";
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EINVAL);
    fill.platform = NULL;
    strcat(tree, "-none");
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -ENOENT);
    strcpy(tree, in(dir, "tree"));
    image = in(dir, "sized");
    fill.min = 1;
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EINVAL);
    fill.free_bytes = 0;
    uint64_t least = size_of(image, &how, &fill);
    CHECK(least > 0 && least < 4 << 20);
    fill.min = 0;
    CHECK(size_of(image, &how, &fill) >= least + (16 << 20));
    fill.free_percent = 50;
    CHECK(size_of(image, &how, &fill) >= 2 * least - (1 << 20));
    fill.free_percent = 96;
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EINVAL);
    fill.free_percent = 0;
    fill.later[6] = 1;
    CHECK(draconis_format_filled(image, &how, &fill, NULL, NULL) == -EINVAL);
    CHECK(draconis_format_filled(image, &how, NULL, NULL, NULL) == -EINVAL);

    image = in(dir, "filled.img");
    uint64_t size = 0;
    CHECK(draconis_grow(image, NULL, 64 << 20, &size) == 0 && size == 64 << 20);
    struct stat there;
    CHECK(stat(image, &there) == 0 && there.st_size == 64 << 20);
    CHECK(draconis_grow(image, NULL, 32 << 20, NULL) == -EINVAL);
    CHECK(strstr(draconis_error_message(), "draconis shrink"));
    CHECK(draconis_shrink(image, NULL, 1, NULL) == -ENOSPC);
    CHECK(draconis_shrink(image, NULL, 0, &size) == 0 && size < 32 << 20);
    CHECK(stat(image, &there) == 0 && (uint64_t)there.st_size == size);
    CHECK(draconis_shrink(in(dir, "none"), NULL, 0, &size) == -ENOENT && size == 0);

    image = in(dir, "filled.img");
    CHECK(draconis_grow(image, NULL, 32 << 20, &size) == 0 && size == 32 << 20);
    draconis_tune_options change = {0};
    change.label = "tuned";
    change.uuid = "01234567-89ab-cdef-0123-456789abcdef";
    change.reserved = "0%";
    change.errors = 2;
    change.max_mounts = 20;
    CHECK(draconis_tune(image, NULL, &change) == 0);
    draconis_volume *volume;
    draconis_volume_info info;
    CHECK(draconis_volume_open(image, NULL, 0, &volume) == 0);
    CHECK(draconis_volume_get_info(volume, &info) == 0 && strcmp(info.label, "tuned") == 0);
    CHECK(info.uuid[0] == 1 && info.uuid[15] == 0xEF);
    CHECK(draconis_tune(image, NULL, &change) == -EBUSY);
    CHECK(draconis_volume_close(volume) == 0);
    change.max_mounts = 32768;
    CHECK(draconis_tune(image, NULL, &change) == -EINVAL);
    change.max_mounts = -1;
    change.reserved = "many";
    CHECK(draconis_tune(image, NULL, &change) == -EINVAL);
    change.reserved = NULL;
    change.features = "nothing";
    CHECK(draconis_tune(image, NULL, &change) == -EINVAL);
    change.later[0] = 1;
    CHECK(draconis_tune(image, NULL, &change) == -EINVAL);
    CHECK(draconis_tune(image, NULL, NULL) == -EINVAL);

    draconis_check_report report;
    CHECK(draconis_check(image, NULL, NULL, NULL, &report) == 0 && report.clean);
    CHECK(draconis_volume_open("s3://bucket/store#disk", NULL, 0, &volume) == -EOPNOTSUPP);
    CHECK(strstr(draconis_error_message(), "uses no network"));
}

/* Three disk images over each other, if the test has made them. */
static void chained(const char *dir) {
    char top[4096], middle[4096], base[4096];
    strcpy(top, in(dir, "top.qcow2"));
    strcpy(middle, in(dir, "middle.qcow2"));
    strcpy(base, in(dir, "base.qcow2"));
    struct stat there;
    if (stat(top, &there) != 0) {
        return;
    }
    const char *behind[] = {middle, base};
    draconis_volume *volume;
    draconis_place place = {0};
    place.backing = middle;
    CHECK(draconis_volume_open(top, NULL, DRACONIS_WRITE, &volume) < 0);
    CHECK(draconis_volume_open(top, &place, DRACONIS_WRITE, &volume) < 0);
    CHECK(strstr(draconis_error_message(), "only what differs from"));
    CHECK(draconis_volume_open_over(top, NULL, NULL, 2, 0, &volume) == -EINVAL);
    CHECK(draconis_volume_open_over(top, NULL, behind, 2, DRACONIS_WRITE, &volume) == 0);
    CHECK(draconis_mkdir(volume, "/over", 0755) == 0);
    CHECK(draconis_volume_close(volume) == 0);
    CHECK(draconis_volume_open_over(top, NULL, behind, 2, 0, &volume) == 0);
    draconis_stat_data data;
    CHECK(draconis_stat(volume, "/over", 0, &data) == 0 && S_ISDIR(data.mode));
    CHECK(draconis_volume_close(volume) == 0);
}

int main(int count, char **arguments) {
    CHECK(count >= 2 && strlen(draconis_version()) > 4);
    files(arguments[1]);
    filled(arguments[1]);
    chained(arguments[1]);
    if (count == 2) {
        things(arguments[1]);
    }
    puts("all of it works");
    return 0;
}
