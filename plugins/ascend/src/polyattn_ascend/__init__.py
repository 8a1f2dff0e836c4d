"""polyattn on Huawei Ascend NPUs: what torch_npu's attention operators can do, as data."""
