/* libdraconis: ext2, ext3 and ext4 volumes, and stores of objects and keys, in the caller's
 * process. Made by `make header`; changes belong into the sources.
 *
 * Failures. A function that returns int or int64_t returns a negative errno when it fails, else 0
 * or what it says; draconis_error_message() then says what it is about. Out pointers hold NULL or
 * zeros after a failure.
 *
 * Ownership. What comes from a *_open or *_new is given back to its *_close or *_free, once, in
 * any order; nothing is to be given to free(). Pointers that are lent say until when. Texts end
 * with NUL; paths in a volume are bytes, absolute or relative to its root.
 *
 * Threads. Volumes, files and stores may be used by any number of threads together, as long as
 * none closes what another uses. Other handles are for one thread at a time. Callbacks are called
 * in the thread of the call, and must return: no longjmp, no exception.
 *
 * Images are locked (flock): one who changes, or several who read. After fork() only one process
 * may use what was open before.
 *
 * The library reads bytes that may be hostile in the process that calls it. It believes none of
 * them, but it confines nothing: the program `draconis` does.
 */

#ifndef DRACONIS_H
#define DRACONIS_H

#include <stddef.h>
#include <stdint.h>

// From the last key to the first.
#define DRACONIS_REVERSE 1

// Chosen by what is measured, where the store is large enough to tell.
#define DRACONIS_LAYOUT_MEASURED 0

// For disks on which distance costs time.
#define DRACONIS_LAYOUT_LOG 1

// For flash.
#define DRACONIS_LAYOUT_COW 2

// To be changed as well, alone.
#define DRACONIS_WRITE 1

// Make a file that is not there.
#define DRACONIS_CREATE 2

// It must not be there.
#define DRACONIS_EXCLUSIVE 4

// Cut it to nothing.
#define DRACONIS_TRUNCATE 8

// Of a symbolic link, itself instead of what it leads to.
#define DRACONIS_NOFOLLOW 16

// What is at the new name stays, and the call fails.
#define DRACONIS_NOREPLACE 32

// What is at the new name gets the old one.
#define DRACONIS_EXCHANGE 64

// Changes of keys that become visible together, whole or not at all. One thread at a time.
typedef struct draconis_batch draconis_batch;

// What a directory held when it was opened. One thread at a time.
typedef struct draconis_dir draconis_dir;

// An open file of a volume. Any number of threads may use it together: there is no position.
typedef struct draconis_file draconis_file;

// Changes of objects that become visible together, whole or not at all. One thread at a time.
typedef struct draconis_group draconis_group;

// The objects that were there when the list was made. One thread at a time.
typedef struct draconis_object_list draconis_object_list;

// Keys and values as they were when the scan began. One thread at a time.
typedef struct draconis_scan draconis_scan;

// An open store. Any number of threads may use it together.
typedef struct draconis_store draconis_store;

// The value of a key, as it was when it was asked for.
typedef struct draconis_value draconis_value;

// An open volume. Any number of threads may use it together.
typedef struct draconis_volume draconis_volume;

// Bytes of ours.
typedef struct draconis_bytes {
    // Where they begin; not NULL.
    const void *bytes;
    // How many.
    size_t len;
} draconis_bytes;

// A store that is to be made.
typedef struct draconis_store_options {
    // Its length in bytes; 0: that of the file or device.
    uint64_t size_bytes;
    // One of DRACONIS_LAYOUT_*.
    uint32_t layout;
    // Not 0: leave a file one hole instead of writing it out.
    int sparse;
    // Not 0: overwrite the store or ext volume that the file or device holds. Nothing else that is
    // recognised is overwritten.
    int force;
} draconis_store_options;

// What a check of a store found.
typedef struct draconis_store_report {
    // Not 0: nothing is wrong.
    int clean;
    // Not 0: all could be looked at.
    int complete;
    // Damaged places.
    uint64_t damage;
    // Objects.
    uint64_t objects;
    // Keys.
    uint64_t keys;
} draconis_store_report;

// Where in an image the volume is. All zero: the whole image, or the only partition that holds a
// volume.
typedef struct draconis_place {
    // It begins at this byte.
    uint64_t offset_bytes;
    // It is this partition, counted from 1.
    uint32_t partition;
    // Of a disk image, what it differs from: names that the image says are not opened. May be
    // NULL.
    const char *backing;
} draconis_place;

// What there is to know of a volume.
typedef struct draconis_volume_info {
    // "ext2", "ext3" or "ext4".
    char kind[8];
    // The label.
    char label[20];
    // The identity.
    uint8_t uuid[16];
    // Length in bytes.
    uint64_t size_bytes;
    // Bytes of a block.
    uint32_t block_bytes;
    // Not 0: unmounted properly.
    int clean;
    // Blocks.
    uint64_t blocks;
    // Blocks that are free.
    uint64_t free_blocks;
    // Inodes.
    uint64_t inodes;
    // Inodes that are free.
    uint64_t free_inodes;
} draconis_volume_info;

// A moment: seconds since 1970, and nanoseconds after that.
typedef struct draconis_time {
    // Seconds; negative before 1970.
    int64_t seconds;
    // 0 to 999999999.
    uint32_t nanoseconds;
} draconis_time;

// What stat(2) says of a file.
typedef struct draconis_stat_data {
    // Its number.
    uint32_t inode;
    // Kind and permissions, as st_mode.
    uint32_t mode;
    // Names.
    uint32_t links;
    // Owner.
    uint32_t uid;
    // Group.
    uint32_t gid;
    // Of a device, its major number.
    uint32_t device_major;
    // Of a device, its minor number.
    uint32_t device_minor;
    // Length in bytes.
    uint64_t size_bytes;
    // Room that it takes, in units of 512 bytes.
    uint64_t blocks_512;
    // Last access.
    struct draconis_time accessed;
    // Last change of the contents.
    struct draconis_time modified;
    // Last change of the inode.
    struct draconis_time changed;
} draconis_stat_data;

// A name in a directory.
typedef struct draconis_entry {
    // The name. Valid until the next call with this directory.
    const char *name;
    // The inode's number.
    uint32_t inode;
    // What it is, as the kind in st_mode.
    uint32_t kind;
} draconis_entry;

// A volume that is to be made. All zero but for the size: ext4, as mke2fs would make it.
typedef struct draconis_format_options {
    // Its length in bytes; 0: that of the image.
    uint64_t size_bytes;
    // "ext2", "ext3" or "ext4"; NULL: "ext4".
    const char *kind;
    // At most 16 bytes; NULL: none.
    const char *label;
    // Features to give or, with ^, to take away, as mke2fs -O spells them; NULL: the usual ones.
    const char *features;
    // Bytes of a block, 1024 to 65536; 0: by the size.
    uint32_t block_bytes;
    // Not 0: overwrite the ext volume that the image holds. Nothing else that is recognised is
    // overwritten.
    int force;
} draconis_format_options;

// What a new volume is filled with. All zero: nothing, and nothing is left out.
typedef struct draconis_fill_options {
    // A directory, or tar archives (plain, gzip, zstd, xz) and container images ("oci:DIR:TAG",
    // "oci-archive:FILE:TAG", "docker-archive:FILE:TAG"), each over those before.
    const char *const *from;
    // How many there are.
    size_t from_count;
    // Patterns of what is left out, as tar --exclude has them.
    const char *const *exclude;
    // How many there are.
    size_t exclude_count;
    // Of an image for several, this platform, such as "linux/arm64"; NULL: this machine's.
    const char *platform;
    // "qcow2" or "vhdx": the volume is made in a disk image; NULL: it is all of the file.
    const char *image_format;
    // Free space of a volume whose size follows from the source, in bytes. Without this,
    // free_percent and min: 10 % of the volume, and at least 16 MiB.
    uint64_t free_bytes;
    // What an archive may unpack to; 0: 16 GiB and a hundred times its length.
    uint64_t limit_bytes;
    // Not 0: everything becomes that of uid and gid.
    int give;
    // Whose it becomes.
    uint32_t uid;
    // Whose it becomes.
    uint32_t gid;
    // Not 0: everything becomes root's, and nothing is for others.
    int squash;
    // Not 0: the same bytes of the same source, whenever and wherever.
    int reproducible;
    // Not 0: the smallest volume that holds the source, also on a longer device. Not with a size.
    int min;
    // Free space as a percentage of the volume, up to 95, instead of free_bytes.
    uint32_t free_percent;
    // All zero: for what later versions know.
    uint64_t later[7];
} draconis_fill_options;

// Hears of a complaint, as a text that is valid during the call.
typedef void (*draconis_complaint_fn)(void *context, const char *complaint);

// What is to be changed of a volume. All zero: nothing.
typedef struct draconis_tune_options {
    // At most 16 bytes, none for none; NULL: as it is.
    const char *label;
    // A UUID, "random" or "clear"; NULL: as it is.
    const char *uuid;
    // Features to give or, with ^, to take away, as tune2fs -O spells them; NULL: as they are.
    const char *features;
    // What is kept for the superuser: blocks, or "5%" of them; NULL: as it is.
    const char *reserved;
    // What the kernel does about damage: 1 goes on, 2 remounts read-only, 3 panics; 0: as it is.
    uint16_t errors;
    // Mounts after which it is to be checked; -1: never; 0: as it is.
    int32_t max_mounts;
    // All zero: for what later versions know.
    uint64_t later[8];
} draconis_tune_options;

// What a check found.
typedef struct draconis_check_report {
    // Not 0: e2fsck -fn would have nothing to say.
    int clean;
    // Not 0: the check went through all passes.
    int complete;
    // Complaints, told or not.
    uint64_t complaints;
    // Inodes in use.
    uint64_t used_inodes;
    // Inodes of the volume.
    uint64_t inodes;
    // Blocks in use.
    uint64_t used_blocks;
    // Blocks of the volume.
    uint64_t blocks;
} draconis_check_report;

// Takes bytes of an archive, all of them; an errno, or 0.
typedef int (*draconis_write_fn)(void *context, const void *bytes, size_t len);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// What the last call of this thread that failed says of it: what it is about, what went wrong,
// and the next step where there is one. Empty if none failed. Valid until the next call that
// fails in this thread; not to be freed.
const char *draconis_error_message(void);

// The version of the library, such as "0.1.0". Not to be freed.
const char *draconis_version(void);

// An empty batch; never NULL. draconis_batch_free gives it back, or draconis_keys_write does.
struct draconis_batch *draconis_batch_new(void);

// Gives a batch back that is not written. NULL is taken.
void draconis_batch_free(struct draconis_batch *batch);

// Gives a key a value.
int draconis_batch_put(struct draconis_batch *batch,
                       const void *key,
                       size_t key_len,
                       const void *value,
                       size_t value_len);

// Takes a key away, if it is there.
int draconis_batch_delete(struct draconis_batch *batch, const void *key, size_t key_len);

// Makes all changes of a batch, or none, after all that was submitted before, and frees batch,
// also when it fails. Durable once draconis_store_wait returned for the ticket, which may be
// NULL.
int draconis_keys_write(const struct draconis_store *store,
                        struct draconis_batch *batch,
                        uint64_t *ticket);

// Gives one key a value, as a batch of its own.
int draconis_keys_put(const struct draconis_store *store,
                      const void *key,
                      size_t key_len,
                      const void *value,
                      size_t value_len,
                      uint64_t *ticket);

// Takes one key away, as a batch of its own.
int draconis_keys_delete(const struct draconis_store *store,
                         const void *key,
                         size_t key_len,
                         uint64_t *ticket);

// The value of a key: 1 and the value, which draconis_value_free gives back, or 0 and NULL if
// there is no such key.
int draconis_keys_get(const struct draconis_store *store,
                      const void *key,
                      size_t key_len,
                      struct draconis_value **value);

// The bytes of a value, valid until it is given back. value must not be NULL.
struct draconis_bytes draconis_value_bytes(const struct draconis_value *value);

// Gives a value back. NULL is taken.
void draconis_value_free(struct draconis_value *value);

// Begins a scan of the keys from from (with it) to to (without it), in the order of their bytes;
// a NULL with the length 0 is no bound. flags: 0 or DRACONIS_REVERSE. draconis_scan_close gives
// it back.
int draconis_scan_open(const struct draconis_store *store,
                       const void *from,
                       size_t from_len,
                       const void *to,
                       size_t to_len,
                       uint32_t flags,
                       struct draconis_scan **scan);

// The next key and its value, which may be NULL: 1, or 0 behind the last. The bytes are valid
// until the next call with this scan. After a failure the scan goes on behind what is damaged.
int draconis_scan_next(struct draconis_scan *scan,
                       struct draconis_bytes *key,
                       struct draconis_bytes *value);

// Gives a scan back. NULL is taken.
void draconis_scan_close(struct draconis_scan *scan);

// Makes an empty store; a file that is not there is made.
int draconis_store_create(const char *store, const struct draconis_store_options *options);

// Opens a store. flags: 0 or DRACONIS_WRITE. draconis_store_close gives it back.
int draconis_store_open(const char *path, uint32_t flags, struct draconis_store **store);

// Makes all durable, leaves a checkpoint, gives the file back and frees store, also when it
// fails. NULL is no failure.
int draconis_store_close(struct draconis_store *store);

// Checks every sum, map and count, without changing anything. Damage is no failure: report says
// it.
int draconis_store_check(const char *store, struct draconis_store_report *report);

// An empty group; never NULL. draconis_group_free gives it back, or draconis_store_submit does.
struct draconis_group *draconis_group_new(void);

// Gives a group back that is not submitted. NULL is taken.
void draconis_group_free(struct draconis_group *group);

// Adds a new, empty object, and writes its number to id.
int draconis_group_create(struct draconis_group *group,
                          const struct draconis_store *store,
                          uint64_t *id);

// Writes bytes at byte at of an object.
int draconis_group_write(struct draconis_group *group,
                         uint64_t id,
                         uint64_t at,
                         const void *bytes,
                         size_t len);

// Writes bytes behind the end of an object.
int draconis_group_append(struct draconis_group *group,
                          uint64_t id,
                          const void *bytes,
                          size_t len);

// Gives an object a length; what is new reads as zeros.
int draconis_group_truncate(struct draconis_group *group, uint64_t id, uint64_t size_bytes);

// Deletes an object.
int draconis_group_delete(struct draconis_group *group, uint64_t id);

// Gives an object a name of 1 to 255 bytes, whatever that led to before.
int draconis_group_name(struct draconis_group *group, const void *name, size_t len, uint64_t id);

// Takes a name away; the object stays.
int draconis_group_unname(struct draconis_group *group, const void *name, size_t len);

// Makes all changes of a group, or none, after all that was submitted before, and frees group,
// also when it fails. Durable once draconis_store_wait returned for the ticket, which may be
// NULL.
int draconis_store_submit(const struct draconis_store *store,
                          struct draconis_group *group,
                          uint64_t *ticket);

// Returns once what has the ticket is durable, with all before it.
int draconis_store_wait(const struct draconis_store *store, uint64_t ticket);

// Makes durable all that was submitted.
int draconis_store_sync(const struct draconis_store *store);

// Reads up to len bytes of an object from byte at on. How many there were, or a negative errno:
// ENOENT if there is no such object.
int64_t draconis_object_read(const struct draconis_store *store,
                             uint64_t id,
                             uint64_t at,
                             void *buffer,
                             size_t len);

// The length of an object, or a negative errno.
int64_t draconis_object_size(const struct draconis_store *store, uint64_t id);

// The number of the object that has a name; ENOENT if there is none.
int draconis_object_named(const struct draconis_store *store,
                          const void *name,
                          size_t len,
                          uint64_t *id);

// Lists the objects. draconis_object_list_close gives the list back.
int draconis_object_list_open(const struct draconis_store *store,
                              struct draconis_object_list **objects);

// The next object, by number: 1, or 0 behind the last. id and size_bytes may be NULL.
int draconis_object_list_next(struct draconis_object_list *objects,
                              uint64_t *id,
                              uint64_t *size_bytes);

// Gives a list back. NULL is taken.
void draconis_object_list_close(struct draconis_object_list *objects);

// Opens the volume in image: a file, a block device, a partition of either, a disk image (qcow2,
// VHDX; VHD, VMDK, Android sparse, gzip, zstd, xz: these are only read), or "STORE#NAME".
// flags: 0 or DRACONIS_WRITE. place may be NULL. draconis_volume_close gives the result back.
int draconis_volume_open(const char *image,
                         const struct draconis_place *place,
                         uint32_t flags,
                         struct draconis_volume **volume);

// The same of an image over others: backing_count files, of which each differs from the next.
// They take the place of place's, and are only read.
int draconis_volume_open_over(const char *image,
                              const struct draconis_place *place,
                              const char *const *backing,
                              size_t backing_count,
                              uint32_t flags,
                              struct draconis_volume **volume);

// Makes all durable, marks the volume as unmounted, gives the image back and frees volume, also
// when it fails. Files that are open answer EBADF from then on; they are still to be closed.
// NULL is no failure.
int draconis_volume_close(struct draconis_volume *volume);

// Makes durable all that was changed. Without it, or draconis_file_sync, changes are in memory
// until there is much of them.
int draconis_volume_sync(const struct draconis_volume *volume);

// What there is to know of a volume.
int draconis_volume_get_info(const struct draconis_volume *volume,
                             struct draconis_volume_info *info);

// What stat(2) would say. flags: 0 or DRACONIS_NOFOLLOW.
int draconis_stat(const struct draconis_volume *volume,
                  const char *path,
                  uint32_t flags,
                  struct draconis_stat_data *data);

// Opens a directory to list it. draconis_dir_close gives it back.
int draconis_dir_open(const struct draconis_volume *volume,
                      const char *path,
                      struct draconis_dir **dir);

// The next name, in the order of the bytes, without "." and "..": 1, or 0 behind the last. Where
// a part of the directory is damaged, what can be read comes first and then -EUCLEAN.
int draconis_dir_next(struct draconis_dir *dir, struct draconis_entry *entry);

// Gives a directory back. NULL is taken.
void draconis_dir_close(struct draconis_dir *dir);

// Where a symbolic link leads: up to len bytes of it go to buffer, without a NUL at the end. The
// length of all of it, or a negative errno.
int64_t draconis_readlink(const struct draconis_volume *volume,
                          const char *path,
                          void *buffer,
                          size_t len);

// An extended attribute, by its whole name such as "user.x": up to len bytes of it go to buffer.
// The length of all of it, or a negative errno: ENODATA if there is none. flags: 0 or
// DRACONIS_NOFOLLOW.
int64_t draconis_getxattr(const struct draconis_volume *volume,
                          const char *path,
                          const char *name,
                          uint32_t flags,
                          void *buffer,
                          size_t len);

// The names of extended attributes, each with a NUL behind it: up to len bytes of them go to
// buffer. The length of all of them, or a negative errno. flags: 0 or DRACONIS_NOFOLLOW.
int64_t draconis_listxattr(const struct draconis_volume *volume,
                           const char *path,
                           uint32_t flags,
                           void *buffer,
                           size_t len);

// Sets an extended attribute, by its whole name, to len bytes. flags: any of DRACONIS_NOFOLLOW and
// DRACONIS_EXCLUSIVE: EEXIST if there is one of that name.
int draconis_setxattr(const struct draconis_volume *volume,
                      const char *path,
                      const char *name,
                      const void *value,
                      size_t len,
                      uint32_t flags);

// Removes an extended attribute: ENODATA if there is none of that name. flags: 0 or
// DRACONIS_NOFOLLOW.
int draconis_removexattr(const struct draconis_volume *volume,
                         const char *path,
                         const char *name,
                         uint32_t flags);

// Makes a directory with these permissions, of the user who runs the program.
int draconis_mkdir(const struct draconis_volume *volume, const char *path, uint32_t mode);

// Makes a symbolic link at path that leads to target.
int draconis_symlink(const struct draconis_volume *volume, const char *target, const char *path);

// Gives what is at from another name.
int draconis_link(const struct draconis_volume *volume, const char *from, const char *to);

// Removes a file, or whatever is no directory.
int draconis_unlink(const struct draconis_volume *volume, const char *path);

// Removes an empty directory.
int draconis_rmdir(const struct draconis_volume *volume, const char *path);

// Moves a name; what is at to is replaced, unless flags is DRACONIS_NOREPLACE or
// DRACONIS_EXCHANGE.
int draconis_rename(const struct draconis_volume *volume,
                    const char *from,
                    const char *to,
                    uint32_t flags);

// Changes permissions. flags: 0 or DRACONIS_NOFOLLOW, here as below.
int draconis_chmod(const struct draconis_volume *volume,
                   const char *path,
                   uint32_t mode,
                   uint32_t flags);

// Changes owner and group.
int draconis_chown(const struct draconis_volume *volume,
                   const char *path,
                   uint32_t uid,
                   uint32_t gid,
                   uint32_t flags);

// Sets the times of last access and of the last change of the contents.
int draconis_utimes(const struct draconis_volume *volume,
                    const char *path,
                    struct draconis_time accessed,
                    struct draconis_time modified,
                    uint32_t flags);

// Opens a regular file. flags: any of DRACONIS_WRITE, DRACONIS_CREATE, DRACONIS_EXCLUSIVE,
// DRACONIS_TRUNCATE; a file that is made gets these permissions. draconis_file_close gives it
// back.
int draconis_file_open(const struct draconis_volume *volume,
                       const char *path,
                       uint32_t flags,
                       uint32_t mode,
                       struct draconis_file **file);

// Reads up to len bytes from offset on. How many there were: fewer only at the end of the file;
// or a negative errno.
int64_t draconis_file_read(const struct draconis_file *file,
                           uint64_t offset,
                           void *buffer,
                           size_t len);

// Writes len bytes at offset. How many were: fewer where the volume became full; or a negative
// errno.
int64_t draconis_file_write(const struct draconis_file *file,
                            uint64_t offset,
                            const void *bytes,
                            size_t len);

// Gives a file a length; what is new reads as zeros.
int draconis_file_truncate(const struct draconis_file *file, uint64_t size_bytes);

// What stat(2) would say of an open file.
int draconis_file_stat(const struct draconis_file *file, struct draconis_stat_data *data);

// Makes a file durable, and what leads to it.
int draconis_file_sync(const struct draconis_file *file);

// Gives a file back. What was written is durable after draconis_volume_close, or sync. NULL is
// taken.
void draconis_file_close(struct draconis_file *file);

// Makes an empty volume in image: a file, which is made if it is not there, a block device, or
// "STORE#NAME", a disk in a store. options may be NULL.
int draconis_format(const char *image, const struct draconis_format_options *options);

// Makes a volume in image, as draconis_format, and fills it. Without a size in options, which may
// be NULL, a file becomes as long as what it is filled with needs. note, which may be NULL, hears
// in this thread of what is left out, a sentence each.
int draconis_format_filled(const char *image,
                           const struct draconis_format_options *options,
                           const struct draconis_fill_options *fill,
                           draconis_complaint_fn note,
                           void *context);

// Makes the volume in image larger: size_bytes long, or, with 0, as long as the file or device.
// A file is lengthened, with a hole. grown, which may be NULL, gets the length that it has then.
// place may be NULL. If it is cut off, the volume is as it was, or doing it again ends it.
int draconis_grow(const char *image,
                  const struct draconis_place *place,
                  uint64_t size_bytes,
                  uint64_t *grown);

// Makes the volume in image smaller: size_bytes long, or, with 0, as short as what it holds. Files
// beyond the new end are moved, inodes there get other numbers, and a file is cut behind the
// volume. Otherwise as draconis_grow.
int draconis_shrink(const char *image,
                    const struct draconis_place *place,
                    uint64_t size_bytes,
                    uint64_t *shrunk);

// Changes what the volume in image says of itself. place may be NULL. Without changes one that
// was cut off is ended.
int draconis_tune(const char *image,
                  const struct draconis_place *place,
                  const struct draconis_tune_options *options);

// Checks the volume in image without changing it. complaint, which may be NULL, hears of each
// complaint in this thread. Damage is no failure: report says it. place may be NULL.
int draconis_check(const char *image,
                   const struct draconis_place *place,
                   draconis_complaint_fn complaint,
                   void *context,
                   struct draconis_check_report *report);

// Writes what is at and below path as a tar archive (pax, holes kept), through write, in this
// thread. How many things could not be read and are left out, of which the first is in
// draconis_error_message, or a negative errno.
int64_t draconis_tar(const struct draconis_volume *volume,
                     const char *path,
                     draconis_write_fn write,
                     void *context);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DRACONIS_H */
