# For debugging a trainer. scripts/launch.sh --debug-rank loads it; by hand: gdb -x .gdbinit --args build-learn/bin/train_single
#
#   pt TENSOR     shape, dtype, device, first values, minimum, maximum, mean (also on GPUs)
#   where_ours    the stack without the frames of LibTorch and the standard library

set print pretty on
set print thread-events off
set pagination off
set breakpoint pending on
# NCCL, CUDA and MPI threads use these themselves.
handle SIGUSR1 SIGUSR2 nostop noprint pass

python
import gdb


class PrintTensor(gdb.Command):
    """pt TENSOR: shape, dtype, device and first values of a torch::Tensor (any expression that names one)."""

    def __init__(self):
        super().__init__("pt", gdb.COMMAND_DATA, gdb.COMPLETE_EXPRESSION)

    def invoke(self, argument, from_tty):
        if not argument:
            print("usage: pt TENSOR")
            return
        try:
            value = gdb.parse_and_eval(argument)
            kind = value.type.strip_typedefs()
            if kind.code in (gdb.TYPE_CODE_REF, gdb.TYPE_CODE_RVALUE_REF):
                value = value.referenced_value()
            elif kind.code == gdb.TYPE_CODE_PTR:
                value = value.dereference()
            address = value.address
            if address is None:
                print("pt: '%s' is a temporary without an address: name a variable" % argument)
                return
            # Looked up as text: the function comes from common/debug_tensor.cpp, which may have no debug symbols.
            text = gdb.parse_and_eval(
                "((const char* (*)(const void*)) &mgp_describe_tensor)((const void*) %d)" % int(address))
            print(text.string())
        except gdb.error as error:
            print("pt: %s" % error)


class WhereOurs(gdb.Command):
    """where_ours: the stack, only the frames of this project."""

    def __init__(self):
        super().__init__("where_ours", gdb.COMMAND_STACK)

    def invoke(self, argument, from_tty):
        frame = gdb.newest_frame()
        while frame is not None:
            place = frame.find_sal()
            name = place.symtab.filename if place.symtab else ""
            if "common/" in name or "examples/" in name or "tests/" in name:
                print("#%-2d %s  %s:%d" % (frame.level(), frame.name(), name, place.line))
            frame = frame.older()


# Step into our code, not into the library's.
for pattern in ("/usr/include/*", "*/torch/include/*"):
    gdb.execute("skip -gfi " + pattern, to_string=True)
PrintTensor()
WhereOurs()
end
