from fusionreg.testing import assert_conforms


def test_bias_relu2():
    assert_conforms("acme.bias_relu2")
