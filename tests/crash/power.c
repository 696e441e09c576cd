/* A disk that forgets what was not synced; preloaded into a test's process, whose real writes stay as they are.

   While CAUCE_POWER_STORE is set, every fsync and fdatasync of something below CAUCE_POWER_ROOT keeps what a loss of
   power would leave of it from then on: STORE/<inode> holds a file's bytes, STORE/<inode>.names a folder's entries.
   Whatever is not in STORE was never synced; power.py puts a folder together from it.

   An inode that was seen is held open, so that its number cannot be given to another file. The descriptor is never
   closed: closing one would drop the record locks that SQLite and the owner's lock hold on the file. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_HELD 4096

static struct { ino_t inode; int descriptor; } held[MAX_HELD];
static int num_held = 0;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static void give_up(const char *what)
{
    fprintf(stderr, "power.c: %s: %s\n", what, strerror(errno));
    abort();
}

/* A descriptor of our own for reading; the caller's may be for writing only. -1 where it cannot be opened. */
static int hold(const char *path, ino_t inode)
{
    for (int i = 0; i < num_held; i++)
        if (held[i].inode == inode)
            return held[i].descriptor;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return -1;
    if (num_held == MAX_HELD)
        give_up("too many files");
    held[num_held].inode = inode;
    held[num_held++].descriptor = descriptor;
    return descriptor;
}

static FILE *begin(const char *store, ino_t inode, const char *suffix, char *beside)
{
    snprintf(beside, PATH_MAX, "%s/%lu%s.new", store, (unsigned long)inode, suffix);
    FILE *out = fopen(beside, "wb");
    if (out == NULL)
        give_up(beside);
    return out;
}

static void end(FILE *out, const char *beside)
{
    char final[PATH_MAX];
    if (fclose(out) != 0)
        give_up(beside);
    snprintf(final, sizeof final, "%.*s", (int)(strlen(beside) - strlen(".new")), beside);
    if (rename(beside, final) != 0)
        give_up(final);
}

static void keep_bytes(const char *store, int descriptor, ino_t inode)
{
    char beside[PATH_MAX], block[1 << 16];
    FILE *out = begin(store, inode, "", beside);
    ssize_t length;
    for (off_t at = 0; (length = pread(descriptor, block, sizeof block, at)) > 0; at += length)
        if (fwrite(block, 1, length, out) != (size_t)length)
            give_up(beside);
    if (length < 0)
        give_up(beside);
    end(out, beside);
}

static void keep_names(const char *store, const char *folder, ino_t inode)
{
    char beside[PATH_MAX], path[PATH_MAX + NAME_MAX + 2];
    struct dirent *entry;
    struct stat found;
    FILE *out = begin(store, inode, ".names", beside);
    DIR *listing = opendir(folder);
    if (listing == NULL)
        give_up(folder);
    while ((entry = readdir(listing)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (lstat(path, &found) != 0 || !(S_ISREG(found.st_mode) || S_ISDIR(found.st_mode)))
            continue;
        hold(path, found.st_ino);
        fprintf(out, "%c %lu %s\n", S_ISDIR(found.st_mode) ? 'd' : 'f', (unsigned long)found.st_ino, entry->d_name);
    }
    closedir(listing);
    end(out, beside);
}

/* 1 where it was kept: the process that is to die soon need not wait for a real disk. */
static int keep(int descriptor)
{
    const char *store = getenv("CAUCE_POWER_STORE"), *root = getenv("CAUCE_POWER_ROOT");
    char link[64], path[PATH_MAX];
    struct stat found;
    if (store == NULL || root == NULL || fstat(descriptor, &found) != 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    size_t size = strlen(root);
    if (strncmp(path, root, size) != 0 || (path[size] != '/' && path[size] != '\0'))
        return 0;
    pthread_mutex_lock(&one_at_a_time);
    int own = hold(link, found.st_ino);
    if (own < 0)
        give_up(path);
    if (S_ISDIR(found.st_mode))
        keep_names(store, path, found.st_ino);
    else
        keep_bytes(store, own, found.st_ino);
    pthread_mutex_unlock(&one_at_a_time);
    return 1;
}

int fsync(int descriptor)
{
    static int (*real)(int) = NULL;
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return keep(descriptor) ? 0 : real(descriptor);
}

int fdatasync(int descriptor)
{
    static int (*real)(int) = NULL;
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return keep(descriptor) ? 0 : real(descriptor);
}
