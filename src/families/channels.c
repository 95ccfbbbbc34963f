/* What goes along the tokens channel by channel: causal convolution and the selective scan, and their gradients. */
#include "interface/channels.h"
#include "kernels.h"

#include "conv.inc.h"
#include "scan.inc.h"
#include "scan_backward.inc.h"

FAMILY(channels) = {
    .conv_scratch_bytes = conv_scratch_bytes,
    .conv_run = conv_run,
    .conv_grad_scratch_bytes = conv_grad_scratch_bytes,
    .conv_grad_run = conv_grad_run,
    .scan_tasks = scan_tasks,
    .scan_scratch_bytes = scan_scratch_bytes,
    .scan_run = scan_run,
    .scan_grad_scratch_bytes = scan_grad_scratch_bytes,
    .scan_grad_run = scan_grad_run,
};
