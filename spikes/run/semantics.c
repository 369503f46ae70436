/* What programs expect of descriptors, names and mappings; also programs that fight the supervisor.
   semantics DIRECTORY; RESTART=1 restarts interrupted calls. Refusals are expected of the spike only. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int stop; static const char *d; static volatile long signals;
static void alarmed(int s){
    signals++;
}
static void *flip(void*p){
    char*x=p;
    while(!stop){
        x[0]^=1;
    }
    return 0;
}
static void *work(void*p){
    char b[300];
    long n=(long)p;
    for(int i=0;i<3000;i++){
        snprintf(b,300,"%s/t%ld-%d",d,n,i);
        int f=open(b,O_CREAT|O_RDWR,0600);
        if(f<0){
            perror(b);
            exit(1);
        }
        if(write(f,b,100)!=100)perror("w");
        struct stat s;
        if(fstat(f,&s)||s.st_size!=100)printf("fstat size %ld\n",(long)s.st_size);
        if(i%2)unlink(b);
        close(f);
    }
    return 0;
}
#define T(what,ok) printf("%s %s%s\n",(ok)?"ok  ":"BAD ",what,""),fflush(stdout)
int main(int c,char**v){
    d=v[1];
    chdir(d);
    char b[512];
    struct stat s,s2;
    // threads
    pthread_t t[4];
    for(long i=0;i<4;i++)pthread_create(t+i,0,work,(void*)i);
    for(int i=0;i<4;i++)pthread_join(t[i],0);
    T("4 threads create, fstat, unlink",1);
    // a thread changes the path meanwhile
    static char path[16]="aa";
    pthread_create(t,0,flip,path);
    int other=0;
    for(int i=0;i<20000;i++){
        int f=open(path,O_CREAT|O_RDWR,0600);
        if(f>=0)close(f);
        else other++;
    }
    stop=1;
    pthread_join(t[0],0);
    T("path flips while it is opened",other==0);
    // signals in the middle
    struct sigaction sa={0};
    sa.sa_handler=alarmed;
    sa.sa_flags=getenv("RESTART")?SA_RESTART:0;
    sigaction(SIGALRM,&sa,0);
    struct itimerval it={{0,300},{0,300}};
    setitimer(ITIMER_REAL,&it,0);
    int bad=0,e=0;
    for(int i=0;i<30000;i++){
        snprintf(b,300,"s%d",i);
        int f=open(b,O_CREAT|O_EXCL|O_RDWR,0600);
        if(f<0){
            bad++;
            e=errno;
        }
        else{
            if(write(f,"x",1)!=1)bad++,e=errno;
            close(f);
            if(unlink(b))bad++,e=errno;
        }
    }
    struct itimerval off={0};
    setitimer(ITIMER_REAL,&off,0);
    printf("     %ld signals, %d bad, errno %d\n",signals,bad,e);
    T("signals every 300 us",bad==0);
    // rename over open file, unlinked open
    int f=open("r1",O_CREAT|O_RDWR,0600);
    write(f,"one",3);
    int g=open("r2",O_CREAT|O_RDWR,0600);
    write(g,"three",5);
    rename("r2","r1");
    fstat(f,&s);
    T("replaced open file: nlink 0, size 3",s.st_nlink==0&&s.st_size==3);
    stat("r1",&s);
    T("its replacement: size 5",s.st_size==5);
    fstat(g,&s2);
    T("same inode by name and descriptor",s.st_ino==s2.st_ino&&s.st_dev==s2.st_dev);
    pread(f,b,3,0);
    T("replaced file still reads",!memcmp(b,"one",3));
    // mmap shared between two processes
    f=open("m",O_CREAT|O_RDWR,0600);
    ftruncate(f,8192);
    char*m=mmap(0,8192,3,MAP_SHARED,f,0);
    close(f);
    if(!fork()){
        int k=open("m",O_RDWR);
        char*q=mmap(0,8192,3,MAP_SHARED,k,0);
        q[5000]='Q';
        _exit(0);
    }
    wait(0);
    T("shared mapping between processes",m[5000]=='Q');
    munmap(m,8192);
    f=open("m",O_RDONLY);
    pread(f,b,1,5000);
    T("and by read",b[0]=='Q');
    close(f);
    // locks
    f=open("l",O_CREAT|O_RDWR,0600);
    flock(f,LOCK_EX);
    int p=fork();
    if(!p){
        int k=open("l",O_RDWR);
        _exit(flock(k,LOCK_EX|LOCK_NB)==0);
    }
    int st;
    waitpid(p,&st,0);
    T("flock between processes",WEXITSTATUS(st)==0);
    // passing by dup, fork, exec
    f=open("pass",O_CREAT|O_RDWR,0600);
    dup2(f,77);
    if(!fork()){
        execl("/bin/bash","sh","-c","echo inherited >&77; stat -L -c %s /proc/self/fd/77",(char*)0);
    }
    wait(0);
    fstat(f,&s);
    T("written by a child's shell",s.st_size==10);
    // truncate under mapping
    f=open("tm",O_CREAT|O_RDWR,0600);
    ftruncate(f,8192);
    m=mmap(0,8192,3,MAP_SHARED,f,0);
    truncate("tm",4096);
    p=fork();
    if(!p){
        m[5000]=1;
        _exit(0);
    }
    waitpid(p,&st,0);
    T("SIGBUS after truncate",WIFSIGNALED(st)&&WTERMSIG(st)==SIGBUS);
    int in=inotify_init();
    T("inotify is refused",inotify_add_watch(in,".",IN_ALL_EVENTS)<0);
    T("io_uring is refused",syscall(SYS_io_uring_setup,4,b)<0&&errno==ENOSYS);
    T("O_TMPFILE is refused",open(".",O_TMPFILE|O_RDWR,0600)<0);
    mkfifo("ff",0600);
    T("fifo is refused at open",open("ff",O_RDWR)<0);
    f=open(".",O_RDONLY|O_DIRECTORY);
    mkdir("sub",0755);
    int sd=openat(f,"sub",O_PATH|O_DIRECTORY);
    int ff=openat(sd,"x",O_CREAT|O_WRONLY,0600);
    T("openat below O_PATH",ff>=0);
    rename("sub","sub2");
    T("openat below a renamed directory",openat(sd,"x",O_RDONLY)>=0);
    fchdir(sd);
    getcwd(b,500);
    T("getcwd after rename",strstr(b,"sub2"));
    printf("     %s\n",b);
    chdir("..");
    rmdir("sub2");
    unlink("sub2/x");
    {
        int r=rmdir("sub2");
        printf("     rmdir %d %s cwd %s\n",r,strerror(errno),getcwd(b,500));
        T("rmdir",r==0);
    }
    ;
    T("create below a removed directory",openat(sd,"y",O_CREAT|O_RDWR,0600)<0);
    symlink("/etc/passwd","abs");
    f=open("abs",O_RDONLY);
    T("absolute link to the host",f>=0&&read(f,b,4)==4&&!memcmp(b,"root",4));
    symlink(d,"self");
    snprintf(b,400,"self/r1");
    T("absolute link into the volume",stat(b,&s)==0);
    T("bad pointer",stat((void*)8,&s)<0&&errno==EFAULT);
    T("bad buffer",stat("r1",(void*)8)<0&&errno==EFAULT);
    f=open("../../etc/../etc/passwd",O_RDONLY);
    printf("     .. out of the volume: %s\n",strerror(f<0?errno:0));
    f=open("app",O_CREAT|O_WRONLY|O_APPEND,0600);
    for(int i=0;i<4;i++)if(!fork()){
        int k=open("app",O_WRONLY|O_APPEND);
        for(int j=0;j<1000;j++)write(k,"12345678",8);
        _exit(0);
    }
    while(wait(0)>0);
    fstat(f,&s);
    printf("     %ld %d\n",(long)s.st_size,f);
    T("O_APPEND by four processes",s.st_size==32000);
    return 0;
}
