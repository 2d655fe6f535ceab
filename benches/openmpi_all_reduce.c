// The peer in C: MPI_Allreduce of float32 sums, as mpi_all_reduce.py does it in Python.
// Usage: mpirun -n RANKS ./openmpi_all_reduce BYTES CALLS BATCHES private|shared
// Prints the microseconds per call of each batch, of the slowest rank.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float *tensor(size_t bytes, int shared) {
    if (!shared) return malloc(bytes);
    float *memory;
    MPI_Win window;
    MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    return memory;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    if (argc != 5) MPI_Abort(MPI_COMM_WORLD, 2);
    size_t bytes = strtoull(argv[1], 0, 10), count = bytes / sizeof(float);
    int calls = atoi(argv[2]), batches = atoi(argv[3]), shared = !strcmp(argv[4], "shared"), rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    float *input = tensor(bytes, shared), *output = tensor(bytes, shared);
    for (size_t i = 0; i < count; i++) input[i] = (float)(i % 16 + rank), output[i] = -1;
    for (int batch = -1; batch < batches; batch++) { // the first one warms up
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int call = 0; call < calls; call++)
            MPI_Allreduce(input, output, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double mine = (MPI_Wtime() - start) * 1e6 / calls, slowest;
        MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0 && batch >= 0) printf("%.4f\n", slowest);
    }
    MPI_Finalize();
}
