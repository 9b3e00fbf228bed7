"""Runs tests marked `parallel` on several ranks, under a plain `pytest`.

    pytest (the parent)            mpirun -n 4 python -m mpirunner <job folder>
    ------------------             --------------------------------------------
    collects, selects, orders
    first test of a batch   --->   4 x pytest over the batch's tests, in the same order
    waits for a test        <---   rank0.jsonl ... rank3.jsonl: start, report, end
    merges 4 reports into 1        (ranks agree after each test, then start the next together)
    hang, death, lone failure ->   every process of the job is killed,
    next test               --->   a fresh job for what is left of the batch

Why not a job a test: importing torch costs a second of processor time a rank, so a suite of short tests would spend its
time on imports. A job a module: what its tests leave behind (messages, Horovod's state) cannot reach another module's.
With `parallel_batch = session` in pytest.ini all modules share a job: faster by an import of torch a module and rank.
On two cores or more, jobs run ahead of their turn while the ordinary tests take one core (see `parent`).

    @pytest.mark.parallel([2, 4])            # bare: 1, 2, 4 and 6 ranks; the test's id says ranks=4
    @pytest.mark.timeout(20)                 # seconds, of which a busy machine makes more; 60 unless said
    def test_sum(comm, ranks, shared_path):  # MPI.COMM_WORLD; its size; one folder for all (tmp_path: one each)
        assert comm.allreduce(1) == ranks

    DISTSEG_TEST_TRANSPORT=torch pytest      # the ranks are started by torchrun, and find no mpi4py

    def test_command_line(mpirun):           # `python -m distseg ...` on 4 ranks
        done = mpirun(4, "-m", "distseg", "train", "demo.yaml", timeout=40)
        assert done.returncode == 0, str(done)

A file a job: `plugin` (options, fixtures), `marks` (what a test asks for, order), `parent` (verdicts), `job` (one mpirun
and what its ranks tell), `rank` (the same, seen from inside), `merge` (many reports -> one), `launch` (command line,
environment, end of processes), `transport` (MPI or torch.distributed), `command` (a real command line under mpirun), `limit` (a hang in a test without ranks), `helper` (a second process for command lines),
`effort` (the clock of all limits: other work on the machine does not fail a test).
"""
